"""A file's bytes in order, read ahead over several connections into a bounded number of buffers."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from fleet.reasons import StepError
from fleet.spec import ModelFile
from runtime.sources import Ranged

SEGMENT = 4 * 1024**2
"""Bytes of one request: large enough that a round trip (10 ms to a hub) vanishes beside it on four connections."""
CONNECTIONS = 4
"""Read ahead of one file."""
BUFFERS = 5
"""Of one fetch, so 20 MiB: four connections of one file and one of another."""


class Buffers:
    """Memory for segments, lent out; a fetch holds no more than this, however large the model is."""

    def __init__(self, count: int = BUFFERS, size: int = SEGMENT) -> None:
        self.size = size
        self._free: list[bytearray] = []
        self._left = asyncio.Semaphore(count)

    @property
    def empty(self) -> bool:
        """Whether the next one has to be waited for."""
        return self._left.locked()

    async def take(self) -> bytearray:
        """One of them, as soon as one is free."""
        await self._left.acquire()
        return self._free.pop() if self._free else bytearray(self.size)

    def give(self, buffer: bytearray) -> None:
        """Back for the next segment."""
        self._free.append(buffer)
        self._left.release()

    def lose(self) -> None:
        """Back without its memory, to which an abandoned read may still write."""
        self._left.release()


async def stream(source: Ranged, file: ModelFile, offset: int, buffers: Buffers) -> AsyncGenerator[memoryview, None]:
    """The file's bytes from `offset` on, in order; a view is valid until the next is asked for.

    Raises StepError as the source does, after the last byte that came in order.
    """
    pending: deque[tuple[_Segment, asyncio.Task[None]]] = deque()
    following = offset
    try:
        while following < file.size or pending:
            while following < file.size and len(pending) < CONNECTIONS and not (pending and buffers.empty):
                length = min(buffers.size, file.size - following)
                segment = _Segment(source, file, following, await buffers.take(), length)
                pending.append((segment, asyncio.create_task(segment.fill())))
                following += length
            segment, filling = pending[0]
            await filling
            if segment.got:
                yield segment.view
            if segment.error is not None:
                raise segment.error
            pending.popleft()
            buffers.give(segment.buffer)
    finally:
        for _, filling in pending:
            filling.cancel()
        await asyncio.gather(*(filling for _, filling in pending), return_exceptions=True)
        for _ in pending:
            buffers.lose()


class _Segment:
    """One request's part of the file."""

    def __init__(self, source: Ranged, file: ModelFile, offset: int, buffer: bytearray, length: int) -> None:
        self.buffer = buffer
        self.got = 0
        self.error: StepError | None = None
        self._source = source
        self._file = file
        self._offset = offset
        self._length = length

    @property
    def view(self) -> memoryview:
        return memoryview(self.buffer)[: self.got]

    async def fill(self) -> None:
        whole = memoryview(self.buffer)[: self._length]
        try:
            while self.got < self._length:
                self.got += await self._source.read(self._file, self._offset + self.got, whole[self.got :])
        except StepError as error:
            self.error = error

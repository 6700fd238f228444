"""One local file that is being written in order, and hashed at the same time."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from fleet.spec import ModelFile
from runtime import disk
from runtime.hashes import CHUNK, Hashes, Hashing
from runtime.pump import Pump, Take, write_all
from runtime.threads import in_thread, stoppable

TELL_S = 0.02
"""Between two looks at how far a copy is: others may be reading the file while it grows."""


class Sink:
    """`size` bytes are in the file, and all of them are in its hashes. The file's length is its journal."""

    def __init__(self, descriptor: int, file: ModelFile) -> None:
        self._descriptor = descriptor
        self._file = file
        self._hashing = Hashing(file)
        self.size = 0
        self.kept = 0
        """Bytes that were there before."""

    @classmethod
    async def open(cls, path: Path, file: ModelFile) -> Self:
        """Open for writing; what is there is hashed and kept, unless it is too much. No symlink is followed."""
        sink = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), file)
        try:
            if os.fstat(sink._descriptor).st_size > file.size:
                os.ftruncate(sink._descriptor, 0)
            stopped = threading.Event()
            await stoppable(lambda: sink._hash_kept(stopped.is_set), stopped.set)
        except BaseException:
            os.close(sink._descriptor)
            raise
        return sink

    async def put(self, chunk: memoryview) -> None:
        """Append; the disk and the hashes work at the same time. Raises OSError."""
        hashing = asyncio.ensure_future(self._hashing.update(chunk))
        try:
            await in_thread(write_all, self._descriptor, chunk)
        finally:
            await hashing
        self.size += len(chunk)

    async def draw(
        self,
        take: Take,
        length: int,
        told: Callable[[int], None],
        *,
        judge: Callable[[], None] = lambda: None,
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        """Append up to `length` bytes that `take` gives, in a thread; `told` hears how many each step brought.

        `judge` is called after each step and may raise, which ends it as a cancellation does: `cut` is called, so that
        `take` returns soon, and is waited for. Raises OSError, after which nothing may be appended, and what `take`
        and `judge` raise; what came before that is in.
        """
        pump, before = Pump(take, self._descriptor, self._hashing.lanes), self.size
        ended: BaseException | None = None
        # A thread of its own: it may wait long for its peer, and the loop has few, which others need meanwhile.
        with ThreadPoolExecutor(1, "pump") as own:
            work = asyncio.get_running_loop().run_in_executor(own, pump.run, length)
            while not work.done():
                try:
                    await asyncio.wait([work], timeout=TELL_S)
                    told(self._moved(before + pump.moved))
                    if ended is None:
                        judge()
                except BaseException as error:  # noqa: BLE001 -- raised below: not while the thread may still write
                    ended = ended or error
                    pump.stop()
                    cut()
        told(self._moved(before + pump.moved))
        failed = work.exception()
        if isinstance(failed, OSError) and not isinstance(ended, asyncio.CancelledError):
            raise failed  # first: a piece that was written in part is in the hashes as a whole
        if ended is not None:
            raise ended
        if failed is not None:
            raise failed

    def _moved(self, size: int) -> int:
        """Note it; returns by how much it grew."""
        brought, self.size = size - self.size, size
        return brought

    def restart(self) -> None:
        """Begin again at the first byte."""
        os.ftruncate(self._descriptor, 0)
        disk.allocate(self._descriptor, self._file.size)  # the length tells what was written, so they went with it
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hashing = Hashing(self._file)
        self.size = self.kept = 0

    def hashes(self) -> Hashes:
        """Of what is in it."""
        return self._hashing.found()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _hash_kept(self, stopped: Callable[[], bool]) -> None:
        while not stopped() and (chunk := os.read(self._descriptor, CHUNK)):
            self._hashing.update_here(memoryview(chunk))
            self.size += len(chunk)
        self.kept = self.size

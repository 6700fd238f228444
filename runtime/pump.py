"""Bytes into a sink at the speed of memory: received, written and hashed at the same time, in threads of their own.

Handing each piece through the event loop instead would halve what a copy out of the disk's cache reaches.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

PIECE = 2 * 1024**2
"""Bytes: so large that handing a piece to another thread (some 20 µs) vanishes beside its copy (1 ms)."""
PIECES = 3
"""One is received and written while two are hashed: 6 MiB for a file, two files at a time."""

Take = Callable[[memoryview], int]
"""Blocks until it has put bytes there; returns how many, fewer than there is room only at the end, and 0 after it."""


class Pump:
    """One run, in one thread; the event loop reads `moved` meanwhile and may say `stop`."""

    def __init__(self, take: Take, target: int, lanes: tuple[Callable[[memoryview], object], ...]) -> None:
        """What is taken is written to the descriptor `target`, from where it stands on. Each lane is given every
        piece, in order, in a thread of its own."""
        self._take = take
        self._target = target
        self._lanes = lanes
        self._stopped = False
        self.moved = 0
        """Bytes that are written, and handed to every lane."""

    def stop(self) -> None:
        """End soon, after a whole piece."""
        self._stopped = True

    def run(self, length: int) -> None:
        """Move so many bytes; fewer where it is stopped or there are no more. All lanes are done when it returns.

        Raises OSError where writing fails, and whatever `take` raises.
        """
        with ExitStack() as stack:
            lanes = [(stack.enter_context(ThreadPoolExecutor(1, "hash")), lane) for lane in self._lanes]
            free = [bytearray(min(PIECE, length)) for _ in range(PIECES)]
            busy: deque[tuple[bytearray, list[Future[object]]]] = deque()
            while self.moved < length and not self._stopped:
                if not free:
                    free.append(_done(*busy.popleft()))
                buffer = free.pop()
                piece = memoryview(buffer)[: length - self.moved]
                piece = piece[: self._take(piece)]
                if not piece:
                    break
                busy.append((buffer, [thread.submit(lane, piece) for thread, lane in lanes]))
                write_all(self._target, piece)
                self.moved += len(piece)
            while busy:
                _done(*busy.popleft())


def write_all(descriptor: int, piece: memoryview) -> None:
    """Append all of it. Raises OSError."""
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _done(buffer: bytearray, hashed: list[Future[object]]) -> bytearray:
    """The buffer, once every lane has had it."""
    for each in hashed:
        each.result()
    return buffer

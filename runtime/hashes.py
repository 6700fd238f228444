"""The hashes of a file, made while its bytes pass: SHA-256, which hubs publish, and BLAKE3, by which nodes verify.

A core hashes 1.9 GB/s with SHA-256 and 6 GB/s with BLAKE3; a disk's cache is copied at 4 GB/s. So whoever verified a
file by its SHA-256 notes the BLAKE3 of the same bytes, and everybody after that needs this one alone.
"""

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from fleet.spec import ModelFile
from runtime.threads import in_thread, stoppable

CHUNK = 4 * 1024**2
"""Bytes of one read of a file that is here."""


class Hashes(NamedTuple):
    """What was found, in hex; empty for what was not asked for."""

    sha256: str
    blake3: str

    def wrong(self, file: ModelFile) -> str:
        """What differs from what is known of the file, in words; empty where nothing does."""
        for name, found, known in (("SHA-256", self.sha256, file.sha256), ("BLAKE3", self.blake3, file.blake3)):
            if found and known and found != known:
                return f"{file.path} has the {name} {found[:12]}…, {known[:12]}… is expected"
        return ""

    def noted(self, file: ModelFile) -> ModelFile:
        """The file with what was found of it."""
        return file.model_copy(update={"sha256": self.sha256 or file.sha256, "blake3": self.blake3 or file.blake3})


class Hashing:
    """The hashes of one file's bytes, in order: BLAKE3, and SHA-256 unless the BLAKE3 is known already."""

    def __init__(self, file: ModelFile) -> None:
        self._blake3 = blake3()
        self._sha256 = None if file.blake3 else hashlib.sha256()

    @property
    def lanes(self) -> tuple[Callable[[memoryview], object], ...]:
        """What each piece is to be given to; different lanes may work at the same time, each in order."""
        return (self._blake3.update,) if self._sha256 is None else (self._sha256.update, self._blake3.update)

    async def update(self, piece: memoryview) -> None:
        """The next bytes, in threads."""
        await asyncio.gather(*(in_thread(lane, piece) for lane in self.lanes))

    def update_here(self, piece: memoryview) -> None:
        """The next bytes, in this thread."""
        for lane in self.lanes:
            lane(piece)

    def found(self) -> Hashes:
        """Of all bytes so far."""
        return Hashes("" if self._sha256 is None else self._sha256.hexdigest(), self._blake3.hexdigest())


async def same_bytes(path: Path, file: ModelFile) -> bool:
    """Whether a local file has the hashes that are known of `file`; False where it cannot be read."""
    stopped = threading.Event()
    return await stoppable(lambda: _same_bytes(path, file, stopped.is_set), stopped.set)


def _same_bytes(path: Path, file: ModelFile, stopped: Callable[[], bool]) -> bool:
    try:
        # Without O_NONBLOCK, a FIFO in the place of the file would hold the thread for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    hashing, buffer = Hashing(file), bytearray(CHUNK)
    try:
        while not stopped() and (size := os.readv(descriptor, [buffer])):
            hashing.update_here(memoryview(buffer)[:size])
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return not hashing.found().wrong(file)

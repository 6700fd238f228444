"""One local file that is being written in order, and hashed at the same time."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Self

from runtime import disk
from runtime.threads import in_thread

CHUNK = 4 * 1024**2
"""Bytes of one read when what was there is hashed."""


class Sink:
    """`size` bytes are in the file, and all of them are in its hash. The file's length is its journal."""

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor = descriptor
        self._most = most
        self._hash = hashlib.sha256()
        self.size = 0
        self.kept = 0
        """Bytes that were there before."""

    @classmethod
    async def open(cls, path: Path, *, most: int) -> Self:
        """Open for writing; what is there is hashed and kept unless it is more than `most`. No symlink is followed."""
        sink = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), most)
        try:
            if os.fstat(sink._descriptor).st_size > most:
                os.ftruncate(sink._descriptor, 0)
            await in_thread(sink._hash_kept)
        except BaseException:
            os.close(sink._descriptor)
            raise
        return sink

    async def put(self, chunk: memoryview) -> None:
        """Append; the disk and the hash work at the same time. Raises OSError."""
        hashing = asyncio.ensure_future(in_thread(self._hash.update, chunk))
        try:
            await in_thread(self._append, chunk)
        finally:
            await hashing
        self.size += len(chunk)

    def restart(self) -> None:
        """Begin again at the first byte."""
        os.ftruncate(self._descriptor, 0)
        disk.allocate(self._descriptor, self._most)  # the length tells what was written, so they went with it
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.size = self.kept = 0

    def digest(self) -> str:
        """The SHA-256 of what is in it, in hex."""
        return self._hash.hexdigest()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _hash_kept(self) -> None:
        while chunk := os.read(self._descriptor, CHUNK):
            self._hash.update(chunk)
            self.size += len(chunk)
        self.kept = self.size

    def _append(self, chunk: memoryview) -> None:
        view = chunk
        while view:
            view = view[os.write(self._descriptor, view) :]

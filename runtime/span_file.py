"""A file of lines that never grows beyond a limit, written by several processes at once: the span exporter's stream."""

import io
import os
from pathlib import Path

from filelock import FileLock


class RotatingLines(io.TextIOBase):
    """Appends text to `path`; when that has reached `limit` bytes it becomes `<path>.1`, in place of the last one.

    Each `write` is one line or more, whole, and reaches the file in one piece, so lines of several processes never
    mix. A process that finds the file rotated by another goes on in the new one. What is kept is at least `limit` and
    at most twice that, plus one write.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = _open(path)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Raises OSError, such as that of a full disk."""
        self._follow()
        data = text.encode()
        written = os.write(self._descriptor, data)
        while written < len(data):  # a full disk that has room again
            written += os.write(self._descriptor, data[written:])
        return len(text)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _follow(self) -> None:
        """Have the file open that has the name, with room in it."""
        if not self._has_the_name():
            self._reopen()
        if os.fstat(self._descriptor).st_size < self._limit:
            return
        with FileLock(f"{self._path}.lock"):
            # Another process may have rotated while this one waited.
            if self._has_the_name() and os.fstat(self._descriptor).st_size >= self._limit:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._reopen()

    def _has_the_name(self) -> bool:
        mine = os.fstat(self._descriptor)
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)

    def _reopen(self) -> None:
        fresh = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = fresh


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

"""The fleet's mirror by its address: a directory, an object store, or a web server that is only read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import obstore

from fleet.reasons import Reason, StepError
from fleet.repos import file_url, path_of_url
from fleet.spec import ModelFile
from runtime.http_source import HttpSource, host_of
from runtime.objects import StoreSource, open_store, told
from runtime.sources import FileSource, Source

READ_AHEAD = 1024**2
"""Bytes a remote reader asks for at once: a header is read in many small pieces."""


class Reader(Protocol):
    """A file of the mirror, read in places."""

    size: int

    def at(self, offset: int, length: int) -> bytes:
        """Bytes of that place; fewer at the file's end."""
        ...


def is_directory(url: str) -> bool:
    """Whether the mirror is a directory of this machine's file systems."""
    return url.startswith("file:")


def is_web(url: str) -> bool:
    """Whether it is a web server, which is filled by somebody else."""
    return url.startswith(("http://", "https://"))


def mirror_source(url: str) -> Source:
    """The mirror of one model (`Weights.mirror`) as a source. Raises StepError for an address that is none."""
    if is_directory(url):
        directory = Path(path_of_url(url))
        return FileSource("mirror", str(directory), lambda file: directory / file.path)
    if is_web(url):
        return HttpSource(
            "mirror", host_of(url), lambda file: file_url(url, file.path), unreachable=Reason.MIRROR_UNREACHABLE
        )
    return StoreSource("mirror", url)


@contextmanager
def reading(url: str, file: ModelFile) -> Iterator[Reader]:
    """Read a mirrored file in places. Raises StepError: WEIGHTS_MISSING, WEIGHTS_UNREADABLE, MIRROR_UNREACHABLE."""
    if is_directory(url):
        path = Path(path_of_url(url)) / file.path
        try:
            with path.open("rb") as stream:
                yield _FileReader(stream, path.stat().st_size)
        except FileNotFoundError as error:
            raise StepError(Reason.WEIGHTS_MISSING, f"{path} is not in the mirror") from error
        except OSError as error:
            raise StepError(Reason.WEIGHTS_UNREADABLE, f"{path}: {error.strerror}") from error
    else:
        yield _StoreReader(url, file.path)


class _FileReader:
    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self.size = size

    def at(self, offset: int, length: int) -> bytes:
        self._stream.seek(offset)
        return self._stream.read(length)


class _StoreReader:
    def __init__(self, url: str, path: str) -> None:
        self._store = open_store(url)
        self._path = path
        self._subject = f"{url}/{path}"
        self._start, self._window = 0, b""
        with told(self._subject):
            self.size = obstore.head(self._store, path)["size"]

    def at(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        end = offset + length
        if length and not (self._start <= offset and end <= self._start + len(self._window)):
            with told(self._subject):
                asked = min(self.size, max(end, offset + READ_AHEAD))
                self._window = bytes(obstore.get_range(self._store, self._path, start=offset, end=asked))
            self._start = offset
        return self._window[offset - self._start : end - self._start]

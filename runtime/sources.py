"""Where a file's bytes can be read: the contracts of sources, and the source that is a directory."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.sink import Sink
from runtime.threads import in_thread

SourceKind = Literal["local", "peer", "mirror", "hub"]

KINDS: tuple[SourceKind, ...] = ("local", "peer", "mirror", "hub")
"""From the nearest to the farthest."""


class Named(Protocol):
    """What all sources have."""

    @property
    def kind(self) -> SourceKind:
        """How far away it is."""
        ...

    @property
    def name(self) -> str:
        """For people: a host or a path, never a secret."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class Ranged(Named, Protocol):
    """Far away: many ranges at once make up for the way there."""

    async def read(self, file: ModelFile, offset: int, view: memoryview) -> int:
        """Put bytes from `offset` on into `view`; returns how many, at least 1 and perhaps fewer than there is room.

        Retries what may pass. Raises StepError: WEIGHTS_MISSING, WEIGHTS_CORRUPT (another size than listed),
        WEIGHTS_UNREADABLE, REPO_FORBIDDEN, HUB_UNREACHABLE, MIRROR_UNREACHABLE. Never OSError: that is the disk's.
        A view of a cancelled read may still be written to.
        """
        ...


@runtime_checkable
class Pouring(Named, Protocol):
    """Near: one stream fills the line, and is not to be slowed down by handing it around."""

    async def pour(self, file: ModelFile, sink: Sink, told: Callable[[int], None]) -> None:
        """Append what the sink has not got yet; `told` hears of each step's bytes.

        Raises StepError as `Ranged.read` does, and OSError where writing fails.
        """
        ...


Source = Ranged | Pouring
"""Gives a model's files."""


class FileSource:
    """Files of this machine, or of a file system that is mounted here."""

    def __init__(self, kind: SourceKind, name: str, locate: Callable[[ModelFile], Path]) -> None:
        self._kind: SourceKind = kind
        self._name = name
        self._locate = locate

    @property
    def kind(self) -> SourceKind:
        return self._kind

    @property
    def name(self) -> str:
        return self._name

    async def read(self, file: ModelFile, offset: int, view: memoryview) -> int:
        return await in_thread(_read, self._locate(file), file, offset, view)

    async def pour(self, file: ModelFile, sink: Sink, told: Callable[[int], None]) -> None:
        path = self._locate(file)
        with ExitStack() as stack:

            def opened() -> int:
                descriptor = _open(path, file)
                stack.callback(os.close, descriptor)  # here: a caller that is cancelled never hears of it
                os.lseek(descriptor, sink.size, os.SEEK_SET)
                return descriptor

            def take(view: memoryview) -> int:
                try:
                    return os.readv(descriptor, [view])
                except OSError as error:
                    raise _unreadable(path, error) from error

            descriptor = await in_thread(opened)
            before = os.fstat(descriptor)
            await sink.draw(take, file.size - sink.size, told)
            if sink.size < file.size:
                raise _shrank(path, sink.size)
            if not file.sha256 and os.fstat(descriptor).st_mtime_ns != before.st_mtime_ns:
                raise StepError(Reason.WEIGHTS_CORRUPT, f"{path} was changed while it was copied")  # no hash tells

    async def close(self) -> None:
        """Nothing is kept open."""


def _read(source: Path, file: ModelFile, offset: int, view: memoryview) -> int:
    descriptor = _open(source, file)
    try:
        got = os.preadv(descriptor, [view], offset)
    except OSError as error:
        raise _unreadable(source, error) from error
    finally:
        os.close(descriptor)
    if not got:
        raise _shrank(source, offset)
    return got


def _open(source: Path, file: ModelFile) -> int:
    try:
        # Without O_NONBLOCK, a FIFO in the place of the file would hold the thread for ever.
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
        raise StepError(
            Reason.WEIGHTS_MISSING if gone else Reason.WEIGHTS_UNREADABLE, f"{source} cannot be read: {error.strerror}"
        ) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size == file.size:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{source} is not a regular file")
    raise StepError(Reason.WEIGHTS_CORRUPT, f"{source} has {status.st_size} bytes, {file.size} are expected")


def _unreadable(source: Path, error: OSError) -> StepError:
    return StepError(Reason.WEIGHTS_UNREADABLE, f"{source} cannot be read: {error.strerror}")


def _shrank(source: Path, size: int) -> StepError:
    return StepError(Reason.WEIGHTS_CORRUPT, f"{source} shrank to {size} bytes while it was copied")

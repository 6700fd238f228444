"""Where a file's bytes can be read: the contract of a source, and the source that is a directory."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.threads import in_thread

SourceKind = Literal["local", "peer", "mirror", "hub"]

KINDS: tuple[SourceKind, ...] = ("local", "peer", "mirror", "hub")
"""From the nearest to the farthest."""


class Source(Protocol):
    """Gives ranges of a model's files."""

    @property
    def kind(self) -> SourceKind:
        """How far away it is."""
        ...

    @property
    def name(self) -> str:
        """For people: a host or a path, never a secret."""
        ...

    async def read(self, file: ModelFile, offset: int, view: memoryview) -> int:
        """Put bytes from `offset` on into `view`; returns how many, at least 1 and perhaps fewer than there is room.

        Retries what may pass. Raises StepError: WEIGHTS_MISSING, WEIGHTS_CORRUPT (another size than listed),
        WEIGHTS_UNREADABLE, REPO_FORBIDDEN, HUB_UNREACHABLE, MIRROR_UNREACHABLE. Never OSError: that is the disk's.
        A view of a cancelled read may still be written to.
        """
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


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

    async def close(self) -> None:
        """Nothing is kept open."""


def _read(source: Path, file: ModelFile, offset: int, view: memoryview) -> int:
    descriptor = _open(source, file)
    try:
        got = os.preadv(descriptor, [view], offset)
    except OSError as error:
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{source} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if not got:
        raise StepError(Reason.WEIGHTS_CORRUPT, f"{source} shrank to {offset} bytes while it was copied")
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

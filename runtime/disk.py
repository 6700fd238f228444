"""What a transfer asks of the disk: space that is its own before the first byte, and names that survive a power cut."""

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

from fleet.reasons import Reason, StepError
from fleet.render import size as render_size

KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: the blocks are taken and the file's length stays, so its length tells how much was written."""
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Of file systems that cannot reserve: there the check of the free space is all there is."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve(lock: Path, sizes: Iterable[tuple[Path, int]], keep_free: int, subject: Path) -> None:
    """Give each file its blocks, or refuse them all: `keep_free` bytes of the disk stay free.

    Whoever reserves on this disk holds `lock` meanwhile, so that no two count the same free space. What a file already
    has counts. `subject` is what the refusal names. Raises StepError(DISK_FULL), OSError.
    """
    wanted = [(path, size) for path, size in sizes if size]
    with FileLock(lock, thread_local=False):
        need = sum(max(0, size - _blocks(path)) for path, size in wanted)
        if not need:
            return
        free = shutil.disk_usage(lock.parent).free
        if need + keep_free > free:
            kept = f", of which {render_size(keep_free)} stay free" if keep_free else ""
            raise StepError(
                Reason.DISK_FULL,
                f"{subject}: needs {render_size(need)}, {render_size(free)} is free{kept}",
            )
        for path, size in wanted:
            _make(path, size)


def allocate(descriptor: int, size: int) -> None:
    """Give an open file its blocks; its length stays. Raises OSError where the disk has not so many."""
    if size and _fallocate(descriptor, KEEP_SIZE, 0, size):
        number = ctypes.get_errno()
        if number not in UNSUPPORTED:
            raise OSError(number, os.strerror(number))


def full(directory: Path, error: OSError, need: int = 0) -> StepError:
    """What a failed write means to a person."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StepError(Reason.NOT_WRITABLE, f"{directory}: {error.strerror or error}")
    try:
        free = render_size(shutil.disk_usage(directory.parent).free)
    except OSError:
        free = "nothing"
    more = f"needs {render_size(need)} more" if need else "needs space"
    return StepError(Reason.DISK_FULL, f"{directory}: {more}, {free} is free: the disk filled up meanwhile")


def regular_size(path: Path) -> int | None:
    """Bytes of a regular file; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def sync(path: Path) -> None:
    """Bring a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def boot() -> str:
    """Names the time since the machine started; what was written in it and not synced is still there."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _make(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        allocate(descriptor, size)
    finally:
        os.close(descriptor)

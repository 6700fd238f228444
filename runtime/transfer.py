"""A model's files into one directory that appears whole and verified, or not at all."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fleet.repos import check_paths
from fleet.spec import ModelFile
from runtime import disk, manifest
from runtime.manifest import MANIFEST
from runtime.sources import Source, SourceKind
from runtime.threads import in_thread
from runtime.visit import PARTS, Visit, Watcher

LOCK_POLL_S = 0.1
"""A waiter asks for the lock ten times a second: a blocked thread could not be cancelled."""
TELL_S = 0.25
"""Between two words about the progress: heartbeats go out twice a second."""


@dataclass(frozen=True)
class Fetched:
    """What a fetch brought."""

    files: tuple[ModelFile, ...]
    """As asked for, with every hash filled in."""
    copied_bytes: int
    """0 where everything was there."""
    seconds: float
    sources: dict[SourceKind, int]
    """Bytes that each kind of source gave; `local` counts what was linked or copied here."""


async def fetch(
    files: Sequence[ModelFile],
    sources: Sequence[Source],
    directory: Path,
    *,
    keep_free: int,
    progress: Callable[[int, int], None],
    local: Callable[[ModelFile], Sequence[Path]] = lambda file: (),
    watcher: Watcher | None = None,
) -> Fetched:
    """Make `directory` hold exactly `files`, each verified; what is there and right is not copied again.

    Each file comes from the first of the `sources` that gives it. `local` names files of this machine that may be it:
    they are hashed, then linked, or copied where they lie on another disk. `keep_free` bytes of the disk stay free;
    the rest that is needed is taken before the first byte. `progress` is called with done and total bytes, from the
    event loop.

    Callers for the same directory take turns, also across processes. The work happens in `<directory>.partial`,
    which the next call goes on from where this one was killed or failed for a reason that may pass; any other
    failure and a cancellation remove it. What appears counts until the machine stops; `manifest.settle` makes it
    count for good. Raises StepError; besides what the last source raises: BAD_INPUT (a hostile path), DISK_FULL,
    NOT_WRITABLE, WEIGHTS_CORRUPT (a hash is wrong twice), WEIGHTS_MISSING (the index names another shard).
    """
    started = time.monotonic()
    check_paths([*(file.path for file in files), MANIFEST, PARTS])
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        async with _locked(directory):
            known = await in_thread(manifest.proven, directory, files)
            if known is not None:
                return Fetched(known, 0, time.monotonic() - started, {})
            visit = Visit(directory, files, sources, local, watcher)
            async with _telling(lambda: progress(visit.done, visit.total)):
                brought = await visit.run(keep_free)
            progress(visit.done, visit.total)
            return Fetched(brought, visit.copied, time.monotonic() - started, visit.given)
    except OSError as error:
        raise disk.full(directory, error) from error


def verified(directory: Path, files: Sequence[ModelFile]) -> bool:
    """Whether `fetch` left exactly these bytes there: a quick look at manifest and sizes; nothing is hashed."""
    return manifest.proven(directory, files) is not None


async def discard(directory: Path) -> None:
    """Remove what `fetch` brought, whole or partial; a fetch that is under way is waited for."""
    async with _locked(directory):
        for path in (directory, directory.with_name(f"{directory.name}.partial")):
            await in_thread(shutil.rmtree, path, ignore_errors=True)


@asynccontextmanager
async def _telling(tell: Callable[[], None]) -> AsyncIterator[None]:
    async def again() -> None:
        while True:
            tell()
            await asyncio.sleep(TELL_S)

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()  # it never ends by itself: this raises what `progress` raised


@asynccontextmanager
async def _locked(directory: Path) -> AsyncIterator[None]:
    lock = FileLock(directory.with_name(f"{directory.name}.lock"), thread_local=False)
    while True:
        # Taken without waiting and without a thread, so a cancellation cannot come between taking and holding.
        try:
            lock.acquire(blocking=False)
            break
        except Timeout:
            await asyncio.sleep(LOCK_POLL_S)
    try:
        yield
    finally:
        lock.release()

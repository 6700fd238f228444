"""A model's files into one directory that appears whole and verified, or not at all."""

import asyncio
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fleet.reasons import Reason, StepError
from fleet.render import size as render_size
from fleet.repos import check_paths
from fleet.spec import ModelFile
from runtime.download import Sink, in_thread, pull

MANIFEST = ".llmgw.json"
"""Written inside the directory before it appears: path, size and SHA-256 of each file."""
LOCK_POLL_S = 0.1
"""A waiter asks for the lock ten times a second: a blocked thread could not be cancelled."""


@dataclass(frozen=True)
class Fetched:
    """What a fetch brought."""

    files: tuple[ModelFile, ...]
    """As asked for, with every hash filled in."""
    copied_bytes: int
    """0 where everything was there."""
    seconds: float


async def fetch(
    files: Sequence[ModelFile],
    source: Callable[[ModelFile], str],
    directory: Path,
    *,
    keep_free: int,
    progress: Callable[[int, int], None],
    headers: Mapping[str, str] | None = None,
) -> Fetched:
    """Make `directory` hold exactly `files`, each verified; what is there and right is not copied again.

    `source` gives a file's URL (`file:///…` or `http(s)://…`, quoted); `headers` go with each HTTP request.
    `keep_free` bytes of the disk stay free. `progress` is called with done and total bytes, from the event loop.

    Callers for the same directory take turns, also across processes. The work happens in `<directory>.partial`,
    which the next call goes on from where this one was killed or failed for a reason that may pass; any other
    failure and a cancellation remove it. Raises StepError; besides what `download.pull` raises: BAD_INPUT
    (a hostile path), DISK_FULL, NOT_WRITABLE, WEIGHTS_CORRUPT (a hash is wrong twice).
    """
    started = time.monotonic()
    check_paths([*(file.path for file in files), MANIFEST])
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        async with _locked(directory):
            known = _recorded(directory, files)
            if known is not None:
                return Fetched(known, 0, time.monotonic() - started)
            visit = _Visit(directory, files, source, headers or {}, progress)
            brought = await visit.run(keep_free)
            return Fetched(brought, visit.copied, time.monotonic() - started)
    except OSError as error:
        raise _disk_error(directory, error) from error


def verified(directory: Path, files: Sequence[ModelFile]) -> bool:
    """Whether `fetch` left exactly these bytes there: a quick look at manifest and sizes; nothing is hashed."""
    return _recorded(directory, files) is not None


async def discard(directory: Path) -> None:
    """Remove what `fetch` brought, whole or partial; a fetch that is under way is waited for."""
    async with _locked(directory):
        for path in (directory, directory.with_name(f"{directory.name}.partial")):
            await in_thread(shutil.rmtree, path, ignore_errors=True)


class _Visit:
    """One fetch under the lock: the partial directory, and how far it is."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[ModelFile],
        source: Callable[[ModelFile], str],
        headers: Mapping[str, str],
        progress: Callable[[int, int], None],
    ) -> None:
        self.directory = directory
        self.partial = directory.with_name(f"{directory.name}.partial")
        self.old = directory.with_name(f"{directory.name}.old")
        recorded = _read_manifest(directory)
        self.files = [
            file if file.sha256 else file.model_copy(update={"sha256": recorded.get(file.path, ("", 0))[0]})
            for file in files
        ]
        self.source = source
        self.headers = headers
        self.progress = progress
        self.total = sum(file.size for file in files)
        self.done = 0
        self.copied = 0

    async def run(self, keep_free: int) -> tuple[ModelFile, ...]:
        """Bring, verify, and let the directory appear."""
        try:
            await in_thread(self._prepare)
            self._reserve(keep_free)
            brought = [await self._bring(file) for file in self.files]
            await in_thread(self._publish, brought)
        except (asyncio.CancelledError, OSError) as error:
            await in_thread(shutil.rmtree, self.partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise _disk_error(self.directory, error, self.total - self.done) from error
            raise
        except StepError as error:
            if not error.failure.retryable:
                await in_thread(shutil.rmtree, self.partial, ignore_errors=True)
            raise
        return tuple(brought)

    def _prepare(self) -> None:
        """Make the partial directory, with links to what the directory already holds."""
        if self.partial.is_symlink() or (self.partial.exists() and not self.partial.is_dir()):
            self.partial.unlink()
        self.partial.mkdir(exist_ok=True)
        for file in self.files:
            target = self._target(file)
            present = self.directory / file.path
            if not target.exists() and _regular_size(present) == file.size:
                with suppress(OSError):  # a file system without hard links: it is fetched again
                    os.link(present, target, follow_symlinks=False)

    def _target(self, file: ModelFile) -> Path:
        """Where a file goes, with real directories all the way: a symlink left there is removed, not followed."""
        here = self.partial
        for part in file.path.split("/")[:-1]:
            here = here / part
            if here.is_symlink() or (here.exists() and not here.is_dir()):
                here.unlink()
            here.mkdir(exist_ok=True)
        target = self.partial / file.path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        elif _regular_size(target) is None:
            target.unlink(missing_ok=True)
        return target

    def _reserve(self, keep_free: int) -> None:
        """Refuse before the first byte what the disk cannot hold."""
        need = self.total - sum(
            min(file.size, _regular_size(self.partial / file.path) or 0) for file in self.files if file.sha256
        )
        free = shutil.disk_usage(self.partial).free
        if need and need + keep_free > free:
            kept = f", of which {render_size(keep_free)} stay free" if keep_free else ""
            raise StepError(
                Reason.DISK_FULL, f"{self.directory}: needs {render_size(need)}, {render_size(free)} is free{kept}"
            )

    async def _bring(self, file: ModelFile) -> ModelFile:
        target = self.partial / file.path
        # Without a hash nothing can prove that what a killed fetch left is right: begin again.
        resume = bool(file.sha256) and (_regular_size(target) or 0) <= file.size
        fresh = 0
        while True:
            digest, kept = await self._pull(file, target, resume=resume)
            if not file.sha256 or digest == file.sha256:
                self.done += file.size
                self.progress(self.done, self.total)
                return file.model_copy(update={"sha256": digest})
            target.unlink()
            fresh += not kept
            resume = False
            if fresh == 2:
                raise StepError(
                    Reason.WEIGHTS_CORRUPT,
                    f"{file.path} has the SHA-256 {digest[:12]}…, {file.sha256[:12]}… is expected (fetched twice)",
                )

    async def _pull(self, file: ModelFile, target: Path, *, resume: bool) -> tuple[str, int]:
        sink = await Sink.open(target, resume=resume)
        try:
            await pull(
                self.source(file),
                file,
                sink,
                headers=self.headers,
                written=lambda: self.progress(self.done + sink.size, self.total),
            )
            return await sink.sync(), sink.kept
        finally:
            self.copied += sink.size - sink.kept
            sink.close()

    def _publish(self, files: Sequence[ModelFile]) -> None:
        """Write the manifest and rename; the disk has everything before the name appears."""
        wanted = {self.partial / file.path for file in files}
        for path in sorted(self.partial.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # not empty: it holds wanted files
                    path.rmdir()
            elif path not in wanted:
                path.unlink()
        entries = [file.model_dump(include={"path", "size", "sha256"}) for file in files]
        manifest = self.partial / MANIFEST
        with manifest.open("x", encoding="utf-8") as stream:
            json.dump({"files": entries}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        for path in [*self.partial.rglob("*"), self.partial]:
            if path.is_dir():
                _sync_directory(path)
        shutil.rmtree(self.old, ignore_errors=True)
        if self.directory.is_symlink() or self.directory.is_file():
            self.directory.unlink()
        elif self.directory.exists():
            self.directory.rename(self.old)
        self.partial.rename(self.directory)
        _sync_directory(self.directory.parent)
        shutil.rmtree(self.old, ignore_errors=True)


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


def _recorded(directory: Path, files: Sequence[ModelFile]) -> tuple[ModelFile, ...] | None:
    """The files with the hashes in the manifest, or None where one is absent or differs."""
    recorded = _read_manifest(directory)
    found = []
    for file in files:
        digest, length = recorded.get(file.path, ("", -1))
        differs = length != file.size or _regular_size(directory / file.path) != file.size
        if differs or not digest or (file.sha256 and file.sha256 != digest):
            return None
        found.append(file.model_copy(update={"sha256": digest}))
    return tuple(found)


def _read_manifest(directory: Path) -> dict[str, tuple[str, int]]:
    """SHA-256 and size by path; empty where there is none or it is damaged."""
    try:
        entries = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        parsed = [ModelFile.model_validate(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {file.path: (file.sha256, file.size) for file in parsed}


def _regular_size(path: Path) -> int | None:
    """Bytes of a regular file; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_error(directory: Path, error: OSError, need: int = 0) -> StepError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StepError(Reason.NOT_WRITABLE, f"{directory}: {error.strerror or error}")
    try:
        free = render_size(shutil.disk_usage(directory.parent).free)
    except OSError:
        free = "nothing"
    more = f"needs {render_size(need)} more" if need else "needs space"
    return StepError(Reason.DISK_FULL, f"{directory}: {more}, {free} is free: the disk filled up meanwhile")

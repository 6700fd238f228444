"""One fetch under its lock: what is here is taken over, the rest comes from sources, and the directory appears."""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fleet.reasons import Reason, StepError
from fleet.repos import INDEX
from fleet.safetensors import MAX_INDEX, check_index
from fleet.spec import ModelFile
from runtime import disk, manifest
from runtime.hashes import Hashes, same_bytes
from runtime.manifest import MANIFEST
from runtime.sink import Sink
from runtime.sources import FileSource, Pouring, Source, SourceKind
from runtime.stream import Buffers, stream
from runtime.threads import in_thread

PARTS = ".llmgw-parts"
"""Directory inside the partial one: files that are not whole yet, by the hash of their path."""
BOOT = "boot"
"""In there: since when whole files of the partial directory are known to be on the disk or in its cache."""
AT_ONCE = 2
"""Files: while one ends or waits for its source, the other keeps the line busy."""


class Watcher(Protocol):
    """Told what happens to the files of a fetch, from the event loop."""

    def grown(self, file: ModelFile, path: Path, size: int) -> None:
        """So many bytes of the file are at `path` now; with all of them, they are verified."""
        ...

    def given_up(self, file: ModelFile, source: Source, error: StepError) -> None:
        """The file is asked of the next source."""
        ...


class Visit:
    """The partial directory, and how far it is."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[ModelFile],
        sources: Sequence[Source],
        local: Callable[[ModelFile], Sequence[Path]],
        watcher: Watcher | None,
    ) -> None:
        self._directory = directory
        self._partial = directory.with_name(f"{directory.name}.partial")
        self._parts = self._partial / PARTS
        recorded = manifest.read(directory)
        self._files = [_known(file, recorded.get(file.path)) for file in files]
        self._sources = sources
        self._dead: set[Source] = set()
        """Peers that are not asked again: they lied, or were too slow."""
        self._local = local
        self._watcher = watcher
        self._buffers = Buffers()
        self._sizes: dict[str, int] = {}
        """Bytes that are here, by path."""
        self.given: dict[SourceKind, int] = {}
        self.total = sum(file.size for file in files)
        self.copied = 0

    @property
    def done(self) -> int:
        """Bytes that are here."""
        return sum(self._sizes.values())

    async def run(self, keep_free: int) -> tuple[ModelFile, ...]:
        """Bring, verify, and let the directory appear."""
        try:
            brought = await self._run(keep_free)
        except (asyncio.CancelledError, OSError) as error:
            await in_thread(shutil.rmtree, self._partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise disk.full(self._directory, error, self.total - self.done) from error
            raise
        except StepError as error:
            if not error.failure.retryable:
                await in_thread(shutil.rmtree, self._partial, ignore_errors=True)
            raise
        return brought

    async def _run(self, keep_free: int) -> tuple[ModelFile, ...]:
        await in_thread(self._prepare)
        whole: dict[str, ModelFile] = {}
        for file in self._files:
            if await self._here(file):
                whole[file.path] = file
        left = [file for file in self._files if file.path not in whole]
        # Without a hash nothing can prove that what a killed fetch left is right: begin again.
        provable = {self._part(file) for file in left if file.sha256}
        await in_thread(self._forget_parts, provable)
        lock = self._directory.parent / ".reserve.lock"
        await in_thread(
            disk.reserve, lock, [(self._part(file), file.size) for file in left], keep_free, self._directory
        )
        paths = {file.path for file in self._files}
        # The index first: a model that lacks a shard is refused before the others are fetched.
        for file in [one for one in left if one.path == INDEX]:
            whole[file.path] = await self._bring(file)
        if INDEX in paths:
            await in_thread(_check_index, self._partial / INDEX, paths)
        for file, brought in zip(
            rest := [one for one in left if one.path != INDEX], await self._all(rest), strict=True
        ):
            whole[file.path] = brought
        files = tuple(whole[file.path] for file in self._files)
        await in_thread(self._publish, files)
        return files

    # -- what is here already -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make the partial directory; what it held since before the machine started last is to be hashed again."""
        for path in (self._partial, self._parts):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                path.unlink()
            path.mkdir(exist_ok=True)
        marker, now = self._parts / BOOT, disk.boot()
        known = marker.read_text(encoding="utf-8") if disk.regular_size(marker) is not None else ""
        if not now or known != now:
            for file in self._files:
                target = self._target(file)
                if disk.regular_size(target) is None:
                    continue
                if target.lstat().st_nlink > 1:
                    target.unlink()  # it is a file of another model too, which must not be written to
                else:
                    target.rename(self._part(file))
            marker.unlink(missing_ok=True)
            marker.write_text(now, encoding="utf-8")

    async def _here(self, file: ModelFile) -> bool:
        """Whether the file stands whole in the partial directory, perhaps put there from this machine."""
        target = self._target(file)
        if file.sha256 and disk.regular_size(target) == file.size:
            self._note(file, target, file.size)
            return True
        recorded = manifest.read(self._directory)
        beside = self._directory / file.path
        if disk.regular_size(beside) == file.size and file.sha256:
            known = recorded.get(file.path)
            proven = known is not None and manifest.agrees(known, file)
            if (proven or await same_bytes(beside, file)) and await in_thread(_link, beside, target):
                self._note(file, target, file.size)
                return True
        return await self._from_here(file, target)

    async def _from_here(self, file: ModelFile, target: Path) -> bool:
        if not file.sha256:
            return False
        for path in self._local(file):
            if path.stat().st_dev != self._partial.stat().st_dev:
                continue  # it is copied, and hashed meanwhile, once the space for it is reserved
            if await same_bytes(path, file) and await in_thread(_link, path, target):
                self._give("local", file.size)
                self._note(file, target, file.size)
                return True
        return False

    def _forget_parts(self, wanted: set[Path]) -> None:
        for path in self._parts.iterdir():
            if path not in wanted and path.name != BOOT:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    # -- what comes ---------------------------------------------------------------------------------------------------

    async def _all(self, files: Sequence[ModelFile]) -> list[ModelFile]:
        """Bring them, a few at a time; the first failure ends the others."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(file: ModelFile) -> ModelFile:
            async with turns:
                return await self._bring(file)

        tasks = [asyncio.create_task(one(file)) for file in files]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring(self, file: ModelFile) -> ModelFile:
        """Have the file whole, from the first source that gives it."""
        part, target = self._part(file), self._target(file)
        sink = await Sink.open(part, file)
        try:
            found = await self._fill(file, sink, part)
        finally:
            sink.close()
        await in_thread(part.rename, target)
        self._note(file, target, file.size)
        return found.noted(file)

    async def _fill(self, file: ModelFile, sink: Sink, part: Path) -> Hashes:
        """Fill the sink with bytes of the right hash; a source that cannot is followed by the next."""
        here = [FileSource("local", str(path), _only(path)) for path in self._elsewhere(file)]
        error = StepError(Reason.WEIGHTS_MISSING, f"{file.path}: there is nobody to ask for it")
        asked: list[Source] = []
        for source in [*here, *self._sources]:
            # A hub's answer may be spoilt on its way: it is asked once more. A peer is not.
            tries = 1 if source.kind in ("local", "peer") else 2
            while tries and source not in self._dead:
                asked.append(source)
                try:
                    await self._pour(file, source, sink, part)
                except StepError as caught:
                    error = caught
                    self._turn_away(file, source, error)
                    if not file.sha256:
                        await in_thread(sink.restart)  # nothing can prove that the next source's bytes fit to these
                    break
                found = sink.hashes()
                wrong = found.wrong(file)
                if not wrong:
                    return found
                error = StepError(Reason.WEIGHTS_CORRUPT, f"{wrong} (from {source.name})")
                # With bytes among them that an earlier fetch left, it may be those: nobody is blamed. Else some may be
                # those of a source before: whoever of them is a peer is not believed again.
                for one in asked if not sink.kept else ():
                    self._turn_away(file, one, error)
                tries -= not sink.kept and len(asked) == 1
                asked.clear()
                await in_thread(sink.restart)
        raise error

    def _elsewhere(self, file: ModelFile) -> list[Path]:
        """Local candidates on another disk."""
        if not file.sha256:
            return []
        device = self._partial.stat().st_dev
        return [path for path in self._local(file) if path.stat().st_dev != device]

    async def _pour(self, file: ModelFile, source: Source, sink: Sink, part: Path) -> None:
        """The bytes that are missing, from one source."""

        def came(size: int) -> None:
            self.copied += size
            self._give(source.kind, size)
            self._note(file, part, sink.size, told=sink.size < file.size)

        self._note(file, part, sink.size, told=sink.size < file.size)
        if sink.size == file.size:
            return
        if isinstance(source, Pouring):
            await source.pour(file, sink, came)
            return
        bytes_of = stream(source, file, sink.size, self._buffers)
        async with contextlib.aclosing(bytes_of):
            async for view in bytes_of:
                await sink.put(view)
                came(len(view))

    def _turn_away(self, file: ModelFile, source: Source, error: StepError) -> None:
        if source.kind == "peer":
            self._dead.add(source)
        if self._watcher is not None:
            self._watcher.given_up(file, source, error)

    def _give(self, kind: SourceKind, size: int) -> None:
        self.given[kind] = self.given.get(kind, 0) + size

    def _note(self, file: ModelFile, path: Path, size: int, *, told: bool = True) -> None:
        self._sizes[file.path] = size
        if self._watcher is not None and told:
            self._watcher.grown(file, path, size)

    # -- where things are ---------------------------------------------------------------------------------------------

    def _part(self, file: ModelFile) -> Path:
        return self._parts / hashlib.sha256(file.path.encode(errors="surrogateescape")).hexdigest()[:32]

    def _target(self, file: ModelFile) -> Path:
        """Where a file goes, with real directories all the way: a symlink left there is removed, not followed."""
        here = self._partial
        for part in file.path.split("/")[:-1]:
            here = here / part
            if here.is_symlink() or (here.exists() and not here.is_dir()):
                here.unlink()
            here.mkdir(exist_ok=True)
        target = self._partial / file.path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        elif disk.regular_size(target) is None:
            target.unlink(missing_ok=True)
        return target

    def _publish(self, files: Sequence[ModelFile]) -> None:
        """Write the manifest and rename."""
        wanted = {self._partial / file.path for file in files}
        for path in sorted(self._partial.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # not empty: it holds wanted files
                    path.rmdir()
            elif path not in wanted:
                path.unlink()
        boot = disk.boot()
        if not boot:
            for path in wanted:
                disk.sync(path)
        (self._partial / MANIFEST).write_text(manifest.dump(files, boot), encoding="utf-8")
        old = self._directory.with_name(f"{self._directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self._directory.is_symlink() or self._directory.is_file():
            self._directory.unlink()
        elif self._directory.exists():
            self._directory.rename(old)
        self._partial.rename(self._directory)
        shutil.rmtree(old, ignore_errors=True)


def _only(path: Path) -> Callable[[ModelFile], Path]:
    return lambda file: path


def _known(file: ModelFile, recorded: ModelFile | None) -> ModelFile:
    """The file; where nobody published a hash of it, with those that it had when it was here before."""
    if file.sha256 or recorded is None:
        return file
    return file.model_copy(update={"sha256": recorded.sha256, "blake3": recorded.blake3})


def _link(source: Path, target: Path) -> bool:
    """Another name for the same file; False where the file system or its rules do not allow that."""
    try:
        os.link(source.resolve(), target, follow_symlinks=False)
    except OSError:
        return False
    return True


def _check_index(path: Path, present: set[str]) -> None:
    with path.open("rb") as stream_:
        check_index(stream_.read(MAX_INDEX + 1), present)

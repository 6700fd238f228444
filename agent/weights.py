"""A model's files on this node: found here, or fetched from peers, the mirror or the hub, and verified either way."""

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry import trace

from agent.hub_cache import HubCache
from agent.offers import Offers
from agent.peer_waits import PeerWaits, peer_waits
from agent.room import Kept, surplus
from fleet.reasons import Reason, StepError
from fleet.repos import file_url
from fleet.spec import ModelFile, Weights
from runtime import manifest
from runtime.config import WeightsConfig
from runtime.http_source import HttpSource, host_of
from runtime.manifest import MANIFEST
from runtime.mirrors import mirror_source
from runtime.peer_source import PeerSource
from runtime.sources import KINDS, Source, SourceKind
from runtime.threads import in_thread
from runtime.transfer import fetch, verified

logger = logging.getLogger(__name__)

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_WORKING = (".partial", ".old", ".lock", ".removed")
"""What is appended to a directory's name while it is worked on."""


@dataclass(frozen=True)
class Brought:
    """A model's files, here."""

    directory: Path
    outcome: SourceKind
    """The farthest source that gave bytes."""
    copied_bytes: int
    sources: dict[SourceKind, int] = field(default_factory=dict)
    """Bytes by source."""


class WeightStore:
    """The node's weights, one directory per `Weights.model_id`; what stands there is whole and verified."""

    def __init__(
        self,
        root: Path,
        keep_free: int,
        config: WeightsConfig | None = None,
        *,
        in_use: Callable[[], Collection[str]] = tuple,
        secret: str = "",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`in_use` names the models of engines that run or are being launched; `secret` opens other nodes;
        `changed` is called when the fleet should know soon what is here."""
        self._root = root
        self._keep_free = keep_free
        self._config = config or WeightsConfig()
        self._in_use = in_use
        self._changed = changed
        self._secret = secret
        self._claimed: dict[str, list[int]] = {}
        """Models that are being fetched or started, with their bytes; once for each claim."""
        self._cache = HubCache(self._config.hub_cache)
        self._settling: set[asyncio.Task[None]] = set()
        self.offers = Offers(root)
        """What other nodes may have of it."""

    def directory(self, weights: Weights) -> Path:
        """Where a model's files are or will be. Raises StepError(BAD_INPUT) for an id that is no plain name."""
        if not _MODEL_ID.fullmatch(weights.model_id) or weights.model_id.endswith(_WORKING):
            raise StepError(Reason.BAD_INPUT, f"{weights.model_id!r} cannot name a directory of weights")
        return self._root / weights.model_id

    def _partial(self, weights: Weights) -> Path:
        directory = self.directory(weights)
        return directory.with_name(f"{directory.name}.partial")

    def has(self, weights: Weights) -> bool:
        """Whether the files are here: a quick look at manifest and sizes."""
        return verified(self.directory(weights), weights.files)

    async def bring(self, weights: Weights, progress: Callable[[int, int], None], peers: Sequence[str] = ()) -> Brought:
        """Have the files here; `progress` is called with done and total bytes. `peers` are asked before the mirror.

        Raises StepError, such as DISK_FULL, WEIGHTS_MISSING, WEIGHTS_CORRUPT; cancelling leaves no partial file.
        """
        directory = self.directory(weights)
        with peer_waits() as waits, self.claim(weights):
            if verified(directory, weights.files):
                _touch(directory)
                return Brought(directory, "local", 0)
            await self._make_room(weights)
            sources = self._sources(weights, peers, waits)
            watcher = _Watch(self.offers)
            try:
                got = await fetch(
                    weights.files,
                    sources,
                    directory,
                    keep_free=self._keep_free,
                    progress=progress,
                    local=self._local(weights),
                    watcher=watcher,
                )
            except StepError as error:
                if error.failure.reason is Reason.DISK_FULL:  # of this node: another may have room
                    raise StepError(Reason.DISK, error.failure.detail) from error
                raise
            finally:
                watcher.close()
                for source in sources:
                    await source.close()
            self.offers.add(directory)
            self._changed()
            self._settle(directory)
        logger.info(
            "weights fetched model=%s bytes=%d seconds=%.1f from=%s",
            weights.model_id,
            got.copied_bytes,
            got.seconds,
            " ".join(f"{kind}:{size}" for kind, size in got.sources.items()) or "local",
        )
        outcome = max(got.sources, key=KINDS.index, default=KINDS[0])
        return Brought(directory, outcome, got.copied_bytes, got.sources)

    def held(self) -> tuple[str, ...]:
        """Ids of the models whose files are here whole."""
        return tuple(sorted(path.name for path in self._models()))

    def room(self, free: int) -> int:
        """Bytes that a further model may take of the disk's `free` ones, with what would be removed for it."""
        if self._config.quota is None:
            return max(0, free)
        kept = self._kept()
        taken = sum(one.size for one in kept)
        loose = sum(one.size for one in kept if one.loose)
        return max(0, min(free + loose, int(self._config.quota) - taken + loose))

    async def close(self) -> None:
        """Wait until what was fetched is on the disk for good."""
        if self._settling:
            await asyncio.wait(self._settling)

    # -- sources ------------------------------------------------------------------------------------------------------

    def _sources(self, weights: Weights, peers: Sequence[str], waits: PeerWaits) -> list[Source]:
        """From the nearest to the farthest."""
        found: list[Source] = []
        if self._secret:
            found += [PeerSource(url, self._secret, waiting=waits.wait) for url in peers]
        found.append(mirror_source(weights.mirror))
        hub = self._config.hub
        if hub.enabled and weights.hub:
            headers = _hub_headers(hub.token_file)
            found.append(
                HttpSource("hub", host_of(weights.hub), lambda file: file_url(weights.hub, file.path), headers=headers)
            )
        return found

    def _local(self, weights: Weights) -> Callable[[ModelFile], Sequence[Path]]:
        """Files of this machine that may be it: of other models here, and of the hub's own cache."""
        others = {
            known.sha256: path / name
            for path in self._models()
            if path.name != weights.model_id
            for name, known in manifest.read(path).items()
        }

        def find(file: ModelFile) -> Sequence[Path]:
            mine = [others[file.sha256]] if file.sha256 in others else []
            return [*(path for path in mine if path.is_file()), *self._cache.find(file)]

        return find

    # -- room ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def claim(self, weights: Weights) -> Iterator[None]:
        """While this lasts, the model is not removed and its bytes count under the quota.

        A start claims its weights until its engine is in the ledger.
        """
        name = weights.model_id
        self._claimed[name] = [*self._claimed.get(name, []), weights.size]
        try:
            yield
        finally:
            self._claimed[name].pop()
            if not self._claimed[name]:
                del self._claimed[name]

    async def _make_room(self, weights: Weights) -> None:
        """Under a quota, remove what was used longest ago until this fits. Raises StepError(DISK)."""
        quota = self._config.quota
        if quota is None:
            return
        kept = [one for one in self._kept() if one.name != weights.model_id]
        self._root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._root).free - self._keep_free + _size_of(self._partial(weights))
        going = surplus(kept, weights.size, int(quota), free, weights.model_id)
        removed = []
        for one in going:
            # Renamed before anything is awaited, so that nobody starts from it meanwhile.
            aside = self._root / f"{one.name}.removed"
            shutil.rmtree(aside, ignore_errors=True)
            (self._root / one.name).rename(aside)
            self.offers.drop(self._root / one.name)
            removed.append(aside)
            self._changed()
            logger.info("weights removed model=%s bytes=%d for=%s", one.name, one.size, weights.model_id)
        for aside in removed:
            await in_thread(shutil.rmtree, aside, ignore_errors=True)

    def _kept(self) -> list[Kept]:
        """What takes space, and whether it may go. What is claimed counts as whole."""
        used = set(self._in_use())
        claimed = [Kept(name, max(sizes), 0.0, loose=False) for name, sizes in self._claimed.items()]
        found = [
            Kept(path.name, _size_of(path), _used_at(path), loose=name not in used)
            for path in self._entries()
            if (name := path.name.removesuffix(".partial")) not in self._claimed
        ]
        return [*claimed, *found]

    def _entries(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return [path for path in self._root.iterdir() if path.is_dir() and not path.name.startswith(".")]

    def _models(self) -> list[Path]:
        return [path for path in self._entries() if not path.name.endswith(_WORKING) and (path / MANIFEST).is_file()]

    def _settle(self, directory: Path) -> None:
        """The disk gets what the engine can already load."""

        async def work() -> None:
            try:
                await in_thread(manifest.settle, directory)
            except OSError as error:
                logger.warning("weights in %s are not on the disk for good: %s", directory, error)

        task = asyncio.create_task(work())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


class _Watch:
    """Offers each file to other nodes while it grows, and notes in the trace which sources were given up."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._told: set[str] = set()

    def grown(self, file: ModelFile, path: Path, size: int) -> None:
        if file.sha256:
            self._told.add(file.sha256)
            self._offers.grow(file.sha256, path, size, file.size)

    def given_up(self, file: ModelFile, source: Source, error: StepError) -> None:
        detail = error.failure.detail[:300]
        logger.warning("weights file=%s source=%s given up: %s", file.path, source.name, detail)
        trace.get_current_span().add_event(
            "source given up",
            {"llmgw.file": file.path, "llmgw.source": source.kind, "llmgw.from": source.name, "llmgw.detail": detail},
        )

    def close(self) -> None:
        for digest in self._told:
            self._offers.end(digest)


def _hub_headers(token_file: Path | None) -> dict[str, str]:
    if token_file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {token_file.read_text(encoding='utf-8').strip()}"}
    except (OSError, UnicodeDecodeError) as error:
        raise StepError(Reason.REPO_FORBIDDEN, f"the token file {token_file} cannot be read") from error


def _touch(directory: Path) -> None:
    """Note that it was used: the manifest's time."""
    try:
        os.utime(directory / MANIFEST)
    except OSError as error:
        logger.warning("%s: its last use cannot be noted: %s", directory, error.strerror)


def _used_at(path: Path) -> float:
    """When it was used last; what is left of a fetch that nobody goes on with was never used."""
    try:
        return (path / MANIFEST).stat().st_mtime if not path.name.endswith(_WORKING) else 0.0
    except OSError:
        return 0.0


def _size_of(path: Path) -> int:
    """Bytes on the disk; reserved ones count."""
    return sum(one.lstat().st_blocks * 512 for one in path.rglob("*") if not one.is_dir())

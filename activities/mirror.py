"""The job's second step: one copy of the model's files for the whole fleet, every byte of it verified."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from temporalio import activity

from activities.contract import DISCARD_WEIGHTS, MIRROR_MODEL, MirrorRequest, MirrorResult
from activities.hub import read_token
from activities.resolutions import Resolutions
from fleet.progress import Pace
from fleet.reasons import Reason, StepError
from fleet.repos import STORES, check_paths, file_url, path_of_url, weights_id
from fleet.spec import ResolvedModel, Weights
from runtime import manifest, shelf
from runtime.config import HubConfig, MirrorConfig
from runtime.http_source import HttpSource, host_of
from runtime.mirrors import is_directory, is_web
from runtime.objects import StoreSource
from runtime.peer_files import peer_files
from runtime.progress import reporting
from runtime.sources import FileSource, Ranged
from runtime.threads import in_thread
from runtime.transfer import Fetched, discard, fetch


class Mirror:
    """Copies models to `<mirror>/<weights id>/`, in a directory or in an object store."""

    def __init__(self, config: MirrorConfig, hub: HubConfig, secret: str = "") -> None:
        """`secret` opens the nodes' doors, for files that only nodes have while the hub is away."""
        self._config = config
        self._hub = hub
        self._secret = secret
        self._kept = Resolutions(config.address)

    @activity.defn(name=MIRROR_MODEL)
    async def mirror_model(self, request: MirrorRequest) -> MirrorResult:
        """Raises StepError as `runtime.transfer.fetch` does, and MIRROR_UNREACHABLE. A cancellation leaves no partial
        file."""
        resolved = request.resolved
        check_paths(file.path for file in resolved.files)
        name = weights_id(resolved)
        url = f"{self._config.address}/{name}"
        pace = Pace(resolved.size)

        def show(done: int, total: int) -> None:
            pace.saw(done, total, time.monotonic())

        # The hub comes last where it was away: it may be back.
        peers = [peer_files(peer, self._secret) for peer in resolved.peers] if self._secret else []
        known = all(file.url for file in resolved.files)
        home = [origin(resolved, hub_headers(self._hub, resolved, request.token))] if known or not peers else []
        sources = [*peers, *home]
        try:
            async with reporting(pace.progress):
                fetched = await self._copy(resolved, sources, url, show)
        finally:
            for source in sources:
                await source.close()
        if fetched.copied_bytes and resolved.repo.startswith("hf:"):
            await self._kept.keep_files(name, fetched.files)
        return MirrorResult(
            outcome="copied" if fetched.copied_bytes else "already mirrored",
            copied_bytes=fetched.copied_bytes,
            seconds=fetched.seconds,
            peer_bytes=fetched.sources.get("peer", 0),
            weights=Weights(
                model_id=name,
                format=resolved.format,
                entry=resolved.entry,
                files=tuple(file.model_copy(update={"url": ""}) for file in fetched.files),
                mirror=url,
                hub=self._on_hub(resolved),
            ),
        )

    @activity.defn(name=DISCARD_WEIGHTS)
    async def discard_weights(self, weights: Weights) -> None:
        """Remove a model's copy; what is gone is gone. Never touches what is not in the mirror."""
        if weights.mirror != f"{self._config.address}/{weights.model_id}":
            return
        if is_directory(weights.mirror):
            await discard(self._config.directory(weights.model_id))
        elif not is_web(weights.mirror):
            await shelf.clear(weights.mirror)

    async def _copy(
        self, resolved: ResolvedModel, sources: Sequence[Ranged], url: str, show: Callable[[int, int], None]
    ) -> Fetched:
        if is_web(url):
            return await shelf.look(resolved.files, url)
        if not is_directory(url):
            return await shelf.fill(resolved.files, sources, url, progress=show)
        directory = self._config.directory(weights_id(resolved))
        fetched = await fetch(resolved.files, sources, directory, keep_free=self._config.keep_free, progress=show)
        if fetched.copied_bytes:
            await in_thread(manifest.settle, directory)  # the fleet's one copy must outlive a power cut
        return fetched

    def _on_hub(self, resolved: ResolvedModel) -> str:
        """Where on the hub a node could read the same files."""
        if not resolved.repo.startswith("hf:") or not resolved.files:
            return ""
        first = resolved.files[0]
        base = first.url.removesuffix(file_url("", first.path))
        same = all(file.url == file_url(base, file.path) for file in resolved.files)
        return base if same else ""


def hub_headers(hub: HubConfig, resolved: ResolvedModel, token_name: str) -> Mapping[str, str]:
    """What a source is told beside a file's URL. The token goes to the hub alone; a redirect to another host drops it.

    Raises StepError(TOKEN_UNKNOWN).
    """
    if not all(file.url.startswith(f"{hub.endpoint.rstrip('/')}/") for file in resolved.files):
        return {}
    token = read_token(hub, token_name)
    return {"Authorization": f"Bearer {token}"} if token else {}


def origin(resolved: ResolvedModel, headers: Mapping[str, str]) -> Ranged:
    """Where the files come from, as their URLs say."""
    urls = {file.path: file.url for file in resolved.files}
    if all(url.startswith("file:") for url in urls.values()):
        return FileSource("hub", resolved.repo, lambda file: Path(path_of_url(urls[file.path])))
    if all(url.startswith(("http://", "https://")) for url in urls.values()):
        first = next(iter(urls.values()), "")
        return HttpSource("hub", host_of(first), lambda file: urls[file.path], headers=headers)
    if resolved.repo.startswith(STORES):
        one = resolved.files[0]
        return StoreSource("hub", unquote(one.url.removesuffix(file_url("", one.path))))
    raise StepError(Reason.WEIGHTS_MISSING, f"{resolved.repo}: its files have no file: and no https: URL")

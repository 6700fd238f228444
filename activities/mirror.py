"""The job's second step: one copy of the model's files for the whole fleet, every byte of it verified."""

import json
from collections.abc import Mapping
from pathlib import Path

from temporalio import activity

from activities.contract import DISCARD_WEIGHTS, MIRROR_MODEL, MirrorRequest, MirrorResult
from activities.registry import read_token
from fleet.reasons import Reason, StepError
from fleet.repos import INDEX, weights_id
from fleet.spec import ResolvedModel, Weights
from runtime.config import HubConfig, MirrorConfig
from runtime.download import in_thread
from runtime.progress import reporting
from runtime.transfer import discard, fetch

MAX_INDEX = 64 * 1024**2
"""Bytes of a shard index: that of a model with a thousand shards takes 10 MB."""


class Mirror:
    """Copies models into `<mirror path>/<weights id>/`."""

    def __init__(self, config: MirrorConfig, hub: HubConfig) -> None:
        self._config = config
        self._hub = hub

    @activity.defn(name=MIRROR_MODEL)
    async def mirror_model(self, request: MirrorRequest) -> MirrorResult:
        """Raises StepError as `runtime.transfer.fetch` does. A cancellation leaves no partial file."""
        resolved = request.resolved
        name = weights_id(resolved)
        directory = self._config.path / name
        progress = {"done_bytes": 0, "total_bytes": resolved.size}

        def show(done: int, total: int) -> None:
            progress.update(done_bytes=done, total_bytes=total)

        async with reporting(lambda: dict(progress)):
            fetched = await fetch(
                resolved.files,
                lambda file: file.url,
                directory,
                keep_free=self._config.keep_free,
                progress=show,
                headers=self._headers(resolved, request.token),
            )
            await in_thread(_check_index, directory, {file.path for file in fetched.files})
        return MirrorResult(
            outcome="copied" if fetched.copied_bytes else "already mirrored",
            copied_bytes=fetched.copied_bytes,
            seconds=fetched.seconds,
            weights=Weights(
                model_id=name,
                format=resolved.format,
                entry=resolved.entry,
                files=tuple(file.model_copy(update={"url": ""}) for file in fetched.files),
                mirror=directory.as_uri(),
            ),
        )

    @activity.defn(name=DISCARD_WEIGHTS)
    async def discard_weights(self, weights: Weights) -> None:
        """Remove a model's copy; what is gone is gone. Never touches what is not in the mirror."""
        directory = self._config.path / weights.model_id
        if weights.mirror == directory.as_uri():
            await discard(directory)

    def _headers(self, resolved: ResolvedModel, token_name: str) -> Mapping[str, str]:
        """The token goes to the hub alone; a redirect to another host drops it."""
        hub = f"{self._hub.endpoint.rstrip('/')}/"
        if not all(file.url.startswith(hub) for file in resolved.files):
            return {}
        token = read_token(self._hub, token_name)
        return {"Authorization": f"Bearer {token}"} if token else {}


def _check_index(directory: Path, present: set[str]) -> None:
    """Every shard that the index names must be there: hashes prove the files that came, not that all came."""
    if INDEX not in present:
        return
    path = directory / INDEX
    try:
        if path.stat().st_size > MAX_INDEX:
            raise ValueError("too large")
        named = {str(value) for value in json.loads(path.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{INDEX} is not a shard index") from error
    absent = sorted(named - present)
    if absent:
        raise StepError(Reason.WEIGHTS_MISSING, f"{INDEX} names {absent[0][:200]!r}, which the repo does not have")

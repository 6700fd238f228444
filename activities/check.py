"""The job's third step: can the engine load these weights, and does one shard fit any node? Also asked alone."""

import asyncio
import functools

from temporalio import activity
from temporalio.client import Client

from activities.contract import CHECK_FIT, CHECK_REPO, CheckRepoRequest, CheckRequest, CheckResult
from activities.headers import of_source, read_shape
from activities.mirror import hub_headers, origin
from activities.snapshots import fleet_of as state_of
from fleet.check import examine, examine_on_paper, refusal
from fleet.paper import fleet_of
from fleet.repos import weights_id
from fleet.shape import ModelShape
from fleet.spec import ResolvedModel, Weights
from runtime.config import HubConfig, MirrorConfig
from runtime.mirrors import reading
from runtime.peer_files import peer_files
from runtime.sources import Ranged
from runtime.threads import abandonable, in_thread


class Check:
    """Compares what weights say about themselves with the engine and with the fleet's capacity."""

    def __init__(self, client: Client, mirror: MirrorConfig, hub: HubConfig, secret: str = "") -> None:
        """`secret` opens the nodes' doors, for a repo that only a node has while its hub is away."""
        self._client = client
        self._mirror = mirror
        self._hub = hub
        self._secret = secret

    @activity.defn(name=CHECK_FIT)
    async def check_fit(self, request: CheckRequest) -> CheckResult:
        """Raises StepError: WEIGHTS_UNREADABLE, WEIGHTS_MISSING, UNSUPPORTED_ARCHITECTURE, BAD_INPUT, BAD_FLAG,
        FIT_UNKNOWN, DOES_NOT_FIT, GPU_COUNT. A fleet without a node that could answer is no failure: the verdict is
        then UNKNOWN."""
        shape = await in_thread(mirrored_shape, request.weights, request.request.args)
        result = examine(
            shape, request.weights, request.request, await state_of(self._client, request.cell), request.silent
        )
        refused = refusal(result)
        if refused is not None:
            raise refused
        return result

    @activity.defn(name=CHECK_REPO)
    async def check_repo(self, request: CheckRepoRequest) -> CheckResult:
        """As `check_fit`, of files that need not be mirrored, on the fleet or on paper; that it does not fit, or is
        not known to, is an answer and no failure."""
        resolved, wish = request.resolved, request.wish
        weights = Weights(
            model_id=weights_id(resolved),
            format=resolved.format,
            entry=resolved.entry,
            files=resolved.files,
            mirror=f"{self._mirror.address}/{weights_id(resolved)}",
        )
        if resolved.note and not resolved.peers:  # the hub is away, and the mirror has it
            shape = await in_thread(mirrored_shape, weights, wish.args)
        else:
            source = self._source(resolved, wish.token or "")
            try:
                opened = of_source(source, asyncio.get_running_loop())
                # A thread of its own: it waits for reads, which take the loop's few threads.
                read = functools.partial(read_shape, resolved, opened, wish.args)
                shape = await abandonable(read, lambda: None)
            finally:
                await source.close()
        if wish.paper is not None:
            return examine_on_paper(shape, weights, wish, fleet_of(wish.paper))
        return examine(shape, weights, wish, await state_of(self._client, wish.cell))

    def _source(self, resolved: ResolvedModel, token: str) -> Ranged:
        if resolved.peers:  # the hub is away: each attempt asks another of the nodes that have it
            return peer_files(resolved.peers[(activity.info().attempt - 1) % len(resolved.peers)], self._secret)
        return origin(resolved, hub_headers(self._hub, resolved, token))


def mirrored_shape(weights: Weights, args: tuple[str, ...] = ()) -> ModelShape:
    """What the files in the mirror say. Raises StepError as `headers.read_shape` does, and MIRROR_UNREACHABLE."""
    return read_shape(weights, lambda file: reading(weights.mirror, file), args)

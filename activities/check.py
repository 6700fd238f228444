"""The job's third step: can the engine load these weights, and does one shard fit any node? Also asked alone."""

import asyncio

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import (
    CHECK_FIT,
    CHECK_REPO,
    QUERY_SNAPSHOT,
    CheckRepoRequest,
    CheckRequest,
    CheckResult,
    Snapshot,
    fleet_id,
)
from activities.headers import of_source, read_shape
from activities.mirror import hub_headers, origin
from fleet.check import examine, examine_on_paper, refusal
from fleet.paper import fleet_of
from fleet.repos import weights_id
from fleet.shape import ModelShape
from fleet.spec import Weights
from fleet.state import FleetState
from runtime.config import HubConfig, MirrorConfig
from runtime.mirrors import reading
from runtime.threads import in_thread


class Check:
    """Compares what weights say about themselves with the engine and with the fleet's capacity."""

    def __init__(self, client: Client, mirror: MirrorConfig, hub: HubConfig) -> None:
        self._client = client
        self._mirror = mirror
        self._hub = hub

    @activity.defn(name=CHECK_FIT)
    async def check_fit(self, request: CheckRequest) -> CheckResult:
        """Raises StepError: WEIGHTS_UNREADABLE, WEIGHTS_MISSING, UNSUPPORTED_ARCHITECTURE, BAD_INPUT, BAD_FLAG,
        FIT_UNKNOWN, DOES_NOT_FIT, GPU_COUNT. A fleet without a node that could answer is no failure: the verdict is
        then UNKNOWN."""
        shape = await in_thread(mirrored_shape, request.weights, request.request.args)
        result = examine(shape, request.weights, request.request, await self._snapshot(request.cell))
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
        if resolved.note:  # the hub is away, and the mirror has it
            shape = await in_thread(mirrored_shape, weights, wish.args)
        else:
            source = origin(resolved, hub_headers(self._hub, resolved, wish.token or ""))
            try:
                opened = of_source(source, asyncio.get_running_loop())
                shape = await in_thread(read_shape, resolved, opened, wish.args)
            finally:
                await source.close()
        if wish.paper is not None:
            return examine_on_paper(shape, weights, wish, fleet_of(wish.paper))
        return examine(shape, weights, wish, await self._snapshot(wish.cell))

    async def _snapshot(self, cell: str) -> FleetState:
        handle = self._client.get_workflow_handle(fleet_id(cell))
        try:
            snapshot: Snapshot = await handle.query(QUERY_SNAPSHOT, result_type=Snapshot)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return FleetState(cell=cell)  # the fleet's workflow has not been started: no node has joined
            raise
        return snapshot.state


def mirrored_shape(weights: Weights, args: tuple[str, ...] = ()) -> ModelShape:
    """What the files in the mirror say. Raises StepError as `headers.read_shape` does, and MIRROR_UNREACHABLE."""
    return read_shape(weights, lambda file: reading(weights.mirror, file), args)

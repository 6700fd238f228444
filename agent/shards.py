"""The activities of a node: start, drain and stop one shard, and the preflight."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import SpanKind
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.node_contract import (
    DRAIN_SHARD,
    PREFLIGHT,
    PREPARE_SHARD,
    RESERVE_PORT,
    START_SHARD,
    STOP_SHARD,
    DrainedShard,
    DrainShard,
    PreflightRequest,
    PreflightResult,
    PreparedShard,
    ReservedPort,
    ReservePort,
    StartedShard,
    StartShard,
    StoppedShard,
    StopShard,
)
from agent.attempts import trace_wait
from agent.ledger import Ledger
from agent.spans import step
from agent.start import Progress
from agent.turns import Turns
from agent.weights import WeightStore
from fleet.devices import suiting
from fleet.metrics import DRAINS, FORCED, STARTS
from fleet.reasons import Failure, Reason, StepError
from fleet.render import size
from fleet.state import Device, Inventory
from runtime.instruments import counter
from runtime.progress import reporting

STARTED = counter(STARTS)
DRAINED = counter(DRAINS)
CUT = counter(FORCED)

AGENT_STOPS = "agent_stops"
"""Error type of an act that the next agent goes on with; retryable."""


class Shards:
    """What the node's queue offers."""

    def __init__(self, turns: Turns, ledger: Ledger, weights: WeightStore, measure: Callable[[], Inventory]) -> None:
        self._node = turns.node
        self._turns = turns
        self._ledger = ledger
        self._weights = weights
        self._measure = measure

    @activity.defn(name=START_SHARD)
    async def start_shard(self, request: StartShard) -> StartedShard:
        """Have exactly this generation serve; what runs already is gone on with.

        Raises StepError with the cause; then no process, partial file or ledger entry of it is left.
        """
        progress = Progress()
        trace_wait(self._node, request.asked_ns)
        async with reporting(progress.said):
            with (
                step("start shard", self._about(request), kind=SpanKind.CONSUMER),
                located(self._node),
                counted(request),
            ):
                return await self._turns.start(request, progress)

    @activity.defn(name=PREPARE_SHARD)
    async def prepare_shard(self, request: StartShard) -> PreparedShard:
        """Have engine and weights for a shard of a gang: none of its engines starts before all nodes have them.

        Raises StepError with the cause; then no partial file is left.
        """
        progress = Progress()
        trace_wait(self._node, request.asked_ns)
        async with reporting(progress.said):
            with step("prepare shard", self._about(request), kind=SpanKind.CONSUMER), located(self._node):
                return await self._turns.prepare(request, progress)

    @activity.defn(name=RESERVE_PORT)
    async def reserve_port(self, request: ReservePort) -> ReservedPort:
        """Keep a port for a gang's rendezvous until its shard ends; as a further rank, the one that is asked for."""
        attributes = self._turns.attributes(request.shard)
        trace_wait(self._node, request.asked_ns)
        name = "check port" if request.port else "reserve port"
        with step(name, attributes, kind=SpanKind.CONSUMER) as span, located(self._node):
            reserved = await self._turns.reserve(request)
            span.set_attribute("llmgw.port", request.port or reserved.port)
            for port in reserved.taken:
                span.add_event("port taken", {"llmgw.port": port})
            return reserved

    @activity.defn(name=DRAIN_SHARD)
    async def drain_shard(self, request: DrainShard) -> DrainedShard:
        """Wait until the engine has nothing in flight, or the deadline."""
        with step("drain shard", self._turns.attributes(request.shard)) as span, located(self._node):
            entry = self._ledger.entry(request.shard)
            started = time.monotonic()
            left = 0
            if entry is not None and entry.shard.generation == request.shard.generation:
                left = await self._turns.drain(entry, request.deadline_s)
                DRAINED.add(1, {"llmgw.model": entry.model, "llmgw.outcome": "forced" if left else "clean"})
                CUT.add(left, {"llmgw.model": entry.model})
            span.set_attribute("llmgw.left_in_flight", left)
            return DrainedShard(left_in_flight=left, seconds=time.monotonic() - started)

    @activity.defn(name=STOP_SHARD)
    async def stop_shard(self, request: StopShard) -> StoppedShard:
        """End this generation, and any older one, with everything it started. What is gone is a success."""
        trace_wait(self._node, request.asked_ns)
        with located(self._node):
            return await self._turns.stop(request.shard, request.grace_s)

    def _about(self, request: StartShard) -> dict[str, str | int]:
        return {
            **self._turns.attributes(request.shard),
            "llmgw.model": request.model,
            "llmgw.engine": request.engine.value,
        }

    @activity.defn(name=PREFLIGHT)
    async def preflight(self, request: PreflightRequest) -> PreflightResult:
        """Whether this node could run one such shard if nothing else of ours ran on it."""
        inventory = await asyncio.to_thread(self._measure)
        offer = next((one for one in inventory.engines if one.engine is request.engine), None)
        failure = _refusal(request, inventory, held=self._weights.has(request.weights))
        devices = _devices(inventory, request.need.gpus)
        return PreflightResult(
            failure=failure.model_copy(update={"node": self._node}) if failure is not None else None,
            free_memory=min((device.usable for device in devices), default=0),
            free_disk=inventory.disk_free,
            engine_version=offer.version if offer is not None else "",
            engine_installed=offer is not None and offer.installed,
        )


def _refusal(request: PreflightRequest, inventory: Inventory, *, held: bool) -> Failure | None:
    """What speaks against it. `held`: the weights are here."""
    need, weights = request.need, request.weights
    if all(offer.engine is not request.engine for offer in inventory.engines):
        return Failure(reason=Reason.ENGINE_MISSING, detail=f"agent.yaml does not name {request.engine}")
    if not held and weights.size > inventory.disk_free:
        detail = f"the weights need {size(weights.size)} of disk, {size(inventory.disk_free)} is free"
        return Failure(reason=Reason.DISK, detail=detail)
    devices = _devices(inventory, need.gpus)
    if len(devices) < need.gpus:
        detail = f"one shard needs {need.gpus} GPUs, the node has {len(devices)}"
        return Failure(reason=Reason.GPU_COUNT, detail=detail)
    least = min(device.total for device in devices)
    if need.memory <= least:
        return None  # what others hold may be free again by the time it is placed: placement waits, and says so
    if need.gpus == 0:
        detail = f"one shard needs {size(need.memory)} of RAM, the node has {size(least)}"
        return Failure(reason=Reason.MEMORY, detail=detail)
    which = f"{need.gpus} GPUs with {size(need.memory)} each" if need.gpus > 1 else f"a GPU with {size(need.memory)}"
    return Failure(reason=Reason.GPU_MEMORY, detail=f"one shard needs {which}, the node's have {size(least)}")


def _devices(inventory: Inventory, gpus: int) -> list[Device]:
    """The RAM, or the largest GPUs that one shard could be given; fewer where there are not so many."""
    found = suiting(inventory.devices, gpus)
    return sorted(found, key=lambda device: (-device.total, -device.usable))[: max(1, gpus)]


@contextmanager
def counted(request: StartShard) -> Iterator[None]:
    """Count a start by how it ends; one that the next agent goes on with has not ended."""
    labels = {"llmgw.model": request.model, "llmgw.engine": request.engine.value}
    try:
        yield
    except StepError as error:
        STARTED.add(1, {**labels, "error.type": error.failure.reason.value})
        raise
    except asyncio.CancelledError:
        if not activity.is_worker_shutdown():
            STARTED.add(1, {**labels, "error.type": Reason.CANCELLED.value})
        raise
    STARTED.add(1, labels)


@contextmanager
def located(node: str) -> Iterator[None]:
    """Put the node into a failure that does not name one; an act cut short by the agent's end may be tried again."""
    try:
        yield
    except StepError as error:
        if error.failure.node:
            raise
        raise StepError(error.failure.reason, error.failure.detail, node=node) from error
    except asyncio.CancelledError:
        if not activity.is_worker_shutdown():
            raise
        raise ApplicationError(
            f"the agent of {node} ends; the next one goes on with this",
            type=AGENT_STOPS,
            category=ApplicationErrorCategory.BENIGN,
        ) from None

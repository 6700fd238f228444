"""A node without engines: it speaks the agent's whole protocol to a real server, many to a process.

`start` decides what a start comes to; `running` is what "runs" on it.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta

from temporalio import activity
from temporalio.client import Client, WithStartWorkflowOperation
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.worker import Worker

from activities import contract, node_contract
from activities.node_contract import (
    AttendRequest,
    DrainedShard,
    DrainShard,
    JoinAnswer,
    JoinRequest,
    LeaseTerms,
    Leave,
    NodeInput,
    PortHolder,
    PreflightRequest,
    PreflightResult,
    PreparedShard,
    Report,
    Reported,
    ReservedPort,
    ReservePort,
    RunningShard,
    ShardChange,
    ShardHealth,
    ShardRef,
    StartedShard,
    StartProgress,
    StartShard,
    StoppedShard,
    StopShard,
)
from agent.__main__ import LEASE_BEATS
from fleet.reasons import Failure
from fleet.spec import Engine
from fleet.state import CPU, Device, EngineOffer, Inventory

GIB = 1024**3

Start = Callable[[StartShard], Awaitable[None]]


async def at_once(request: StartShard) -> None:
    """Every start succeeds."""


class LightNode:
    """One node; use it as an async context manager. Leaving it is a crash: nothing is told to anybody."""

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        memory: int = 16 * GIB,
        start: Start = at_once,
        prepare: Start = at_once,
        terms: LeaseTerms | None = None,
        cell: str = "main",
        url: str = "",
    ) -> None:
        """`url` is where all its engines answer; without it each has an endpoint that nobody reaches."""
        self.client = client
        self.name = name
        self.cell = cell
        self.url = url
        self.start = start
        self.prepare = prepare
        self.terms = terms or LeaseTerms(heartbeat_timeout_s=2, grace_s=1)
        self.incarnation = uuid.uuid4().hex[:12]
        self.machine = ""
        self.inventory = Inventory(
            address="127.0.0.1",
            devices=(Device(uuid=CPU, total=memory),),
            engines=(EngineOffer(engine=Engine.LLAMACPP, version="test", installed=True),),
            disk_total=100 * GIB,
            disk_free=50 * GIB,
        )
        self.running: dict[ShardRef, RunningShard] = {}
        self.ended: tuple[ShardChange, ...] = ()
        """What its join says of engines that ended before."""
        self.prepared: list[StartShard] = []
        self.reserved: list[ReservePort] = []
        """As rank 0."""
        self.checked: list[ReservePort] = []
        """As a further rank."""
        self.taken: dict[int, PortHolder] = {}
        """Ports that somebody has there."""
        self.started: list[StartShard] = []
        self.stopped: list[ShardRef] = []
        self.drained: list[ShardRef] = []
        self.left_in_flight = 0
        """What each drain's deadline cuts short."""
        self.progress: tuple[StartProgress, ...] = ()
        """What the heartbeats of starts carry."""
        self.attending = asyncio.Event()
        self._leases = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "LightNode":
        for queue, calls in (
            (
                contract.node_queue(self.name),
                [
                    *(self.preflight, self.prepare_shard, self.reserve_port),
                    *(self.start_shard, self.drain_shard, self.stop_shard),
                ],
            ),
            (contract.lease_queue(self.name, self.incarnation), [self.attend]),
        ):
            worker = Worker(
                self.client,
                task_queue=queue,
                activities=calls,  # type: ignore[arg-type]
                graceful_shutdown_timeout=timedelta(0),
                max_concurrent_activity_task_polls=1,
                max_heartbeat_throttle_interval=timedelta(seconds=self.terms.heartbeat_timeout_s * LEASE_BEATS),
            )
            await self._stack.enter_async_context(worker)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def join(self) -> JoinAnswer:
        """Introduce this process."""
        answer: JoinAnswer = await self.client.execute_update_with_start_workflow(
            node_contract.JOIN,
            JoinRequest(
                node=self.name,
                incarnation=self.incarnation,
                inventory=self.inventory,
                shards=tuple(self.running.values()),
                changes=self.ended,
                machine=self.machine,
            ),
            start_workflow_operation=WithStartWorkflowOperation(
                node_contract.NODE_WORKFLOW,
                NodeInput(node=self.name, cell=self.cell, terms=self.terms),
                id=contract.node_id(self.name),
                task_queue=contract.CONTROL_QUEUE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            ),
            result_type=JoinAnswer,
        )
        return answer

    async def report_exit(self, shard: ShardRef, failure: Failure) -> None:
        """An engine ended by itself."""
        self.running.pop(shard, None)
        change = ShardChange(shard=shard, health=ShardHealth.EXITED, failure=failure)
        handle = self.client.get_workflow_handle(contract.node_id(self.name))
        report = Report(node=self.name, incarnation=self.incarnation, changes=(change,))
        await handle.execute_update(node_contract.REPORT, report, result_type=Reported)

    async def leave(self) -> None:
        """Go away on purpose."""
        handle = self.client.get_workflow_handle(contract.node_id(self.name))
        leave = Leave(node=self.name, incarnation=self.incarnation)
        await handle.execute_update(node_contract.LEAVE, leave, result_type=Reported)

    @activity.defn(name=node_contract.ATTEND)
    async def attend(self, request: AttendRequest) -> None:
        self._leases += 1
        self.attending.set()
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.2)
        finally:
            self._leases -= 1  # a new lease may be open before the old one has ended
            if not self._leases:
                self.attending.clear()

    @activity.defn(name=node_contract.PREFLIGHT)
    async def preflight(self, request: PreflightRequest) -> PreflightResult:
        return PreflightResult(
            free_memory=self.inventory.devices[0].total, free_disk=self.inventory.disk_free, engine_installed=True
        )

    @activity.defn(name=node_contract.START_SHARD)
    async def start_shard(self, request: StartShard) -> StartedShard:
        self.started.append(request)
        beat = asyncio.create_task(self._beat())
        try:
            await self.start(request)
        finally:
            beat.cancel()
        endpoint = self.url or f"http://{self.name}/{request.shard.replica}"
        self.running[request.shard] = RunningShard(shard=request.shard, pid=1, endpoint=endpoint, ready=True)
        return StartedShard(shard=request.shard, node=self.name, pid=1, endpoint=endpoint, weights_outcome="local")

    @activity.defn(name=node_contract.PREPARE_SHARD)
    async def prepare_shard(self, request: StartShard) -> PreparedShard:
        self.prepared.append(request)
        await self.prepare(request)
        return PreparedShard(shard=request.shard, node=self.name, weights_outcome="local")

    @activity.defn(name=node_contract.RESERVE_PORT)
    async def reserve_port(self, request: ReservePort) -> ReservedPort:
        (self.checked if request.port else self.reserved).append(request)
        refused = {*self.taken, *request.avoid}
        first = request.port or 21000
        port = next(port for port in range(first, 65536) if port not in refused)
        taken = tuple(range(first, port))
        holder = next((self.taken[port] for port in taken if port not in request.avoid), None)
        return ReservedPort(address="127.0.0.1", port=port, taken=taken, holder=holder)

    async def _beat(self) -> None:
        while True:
            activity.heartbeat(*self.progress)
            await asyncio.sleep(0.2)

    @activity.defn(name=node_contract.DRAIN_SHARD)
    async def drain_shard(self, request: DrainShard) -> DrainedShard:
        self.drained.append(request.shard)
        return DrainedShard(left_in_flight=self.left_in_flight, seconds=0.0)

    @activity.defn(name=node_contract.STOP_SHARD)
    async def stop_shard(self, request: StopShard) -> StoppedShard:
        self.stopped.append(request.shard)
        return StoppedShard(was_running=self.running.pop(request.shard, None) is not None)

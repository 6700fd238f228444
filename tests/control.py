"""A control plane for tests: real workflows and planner, stand-ins for what reads repos, files and engines."""

import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities import contract
from activities.contract import (
    CheckRequest,
    CheckResult,
    FitVerdict,
    JobResult,
    JobStatus,
    MirrorRequest,
    MirrorResult,
    ResolveRequest,
    SmokeRequest,
    SmokeResult,
    Snapshot,
)
from activities.place import Place
from fleet.reasons import StepError
from fleet.spec import Engine, Format, ResolvedModel, ShardNeed, Weights
from fleet.state import FleetState, Policy, ReplicaRecord, ReplicaState
from tests.fleets import GIB, weights
from tests.light_node import LightNode
from tests.waiting import until
from workflows import WORKFLOWS


@dataclass
class Answers:
    """What the stand-ins say; `errors` by activity name come first."""

    memory: int = GIB
    errors: dict[str, StepError] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]

    @activity.defn(name=contract.RESOLVE_MODEL)
    async def resolve_model(self, request: ResolveRequest) -> ResolvedModel:
        self.called(contract.RESOLVE_MODEL)
        files = weights().files
        return ResolvedModel(repo=request.repo, revision="abc", format=Format.GGUF, entry="model.gguf", files=files)

    @activity.defn(name=contract.MIRROR_MODEL)
    async def mirror_model(self, request: MirrorRequest) -> MirrorResult:
        self.called(contract.MIRROR_MODEL)
        return MirrorResult(
            outcome="copied", copied_bytes=GIB, seconds=2.0, weights=weights(request.resolved.repo[-8:])
        )

    @activity.defn(name=contract.DISCARD_WEIGHTS)
    async def discard_weights(self, request: Weights) -> None:
        self.called(contract.DISCARD_WEIGHTS)

    @activity.defn(name=contract.CHECK_FIT)
    async def check_fit(self, request: CheckRequest) -> CheckResult:
        self.called(contract.CHECK_FIT)
        return CheckResult(
            verdict=FitVerdict.FITS,
            sentence="fits",
            engine=Engine.LLAMACPP,
            architecture="llama",
            context_length=request.request.context_length or 2048,
            need=ShardNeed(memory=int(request.request.memory or self.memory), disk=GIB),
        )

    @activity.defn(name=contract.SMOKE_TEST)
    async def smoke_test(self, request: SmokeRequest) -> SmokeResult:
        self.called(contract.SMOKE_TEST)
        return SmokeResult(answer="Paris.", seconds=0.1, completion_tokens=3, tokens_per_second=30.0)


class Cell:
    """One fleet on the shared server."""

    def __init__(self, client: Client, answers: Answers) -> None:
        self.client = client
        self.answers = answers
        self.name = f"c{uuid.uuid4().hex[:8]}"
        self.fleet: WorkflowHandle[Any, Any] = client.get_workflow_handle(contract.fleet_id(self.name))

    def node(self, name: str, **more: Any) -> LightNode:
        return LightNode(self.client, f"{name}-{self.name}", cell=self.name, **more)

    async def state(self) -> FleetState:
        snapshot: Snapshot = await self.fleet.query(contract.QUERY_SNAPSHOT, result_type=Snapshot)
        return snapshot.state

    async def start(self, request: Any) -> WorkflowHandle[Any, JobResult]:
        body = {"cell": self.name, **request} if isinstance(request, dict) else request
        handle: WorkflowHandle[Any, JobResult] = await self.client.start_workflow(
            contract.MODEL_JOB_WORKFLOW,
            *([] if body is None else [body]),
            id=f"job/{uuid.uuid4().hex[:8]}",
            task_queue=contract.CONTROL_QUEUE,
            result_type=JobResult,
        )
        return handle

    async def run(self, request: dict[str, Any]) -> JobResult:
        return await (await self.start(request)).result()

    async def status(self, job: WorkflowHandle[Any, Any]) -> JobStatus:
        status: JobStatus = await job.query(contract.QUERY_STATUS, result_type=JobStatus)
        return status

    async def replica(self, name: str, state: ReplicaState, *, generation: int = 0) -> ReplicaRecord:
        """Wait until a replica is in a state (in a later generation than the one given)."""

        async def there() -> ReplicaRecord | None:
            found = (await self.state()).replicas.get(name)
            return found if found is not None and found.state is state and found.generation > generation else None

        found = await until(there, 30.0)
        assert found is not None
        return found


@contextlib.asynccontextmanager
async def control_plane(
    client: Client, *, policy: Policy | None = None, answers: Answers | None = None, cached: int = 1000
) -> AsyncIterator[Cell]:
    """A worker with everything and a running Fleet in a cell of its own; all its workflows are ended afterwards."""
    cell = Cell(client, answers or Answers())
    said = cell.answers
    calls = [
        said.resolve_model,
        said.mirror_model,
        said.discard_weights,
        said.check_fit,
        said.smoke_test,
        Place(client).place,
    ]
    worker = Worker(
        client,
        task_queue=contract.CONTROL_QUEUE,
        workflows=WORKFLOWS,
        activities=calls,  # type: ignore[arg-type]
        max_cached_workflows=cached,
    )
    async with worker:
        state = FleetState(policy=policy or Policy())
        await client.start_workflow(
            contract.FLEET_WORKFLOW,
            {"cell": cell.name, "state": state.model_dump(mode="json")},
            id=contract.fleet_id(cell.name),
            task_queue=contract.CONTROL_QUEUE,
        )
        try:
            yield cell
        finally:
            await until(lambda: _ended_all(client), 30.0)


async def _ended_all(client: Client) -> bool:
    """Terminate what runs; visibility lags, so until nothing is listed."""
    found = [running.id async for running in client.list_workflows("ExecutionStatus = 'Running'")]
    for workflow_id in found:
        with contextlib.suppress(RPCError):  # it ended by itself meanwhile
            await client.get_workflow_handle(workflow_id).terminate("the test is over")
    return not found

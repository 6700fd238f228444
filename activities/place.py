"""A pass's decision: take Fleet's snapshot, plan with the pure code in `fleet/`, commit the plan to Fleet."""

import asyncio
import time
from collections.abc import Sequence

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities import contract
from activities.contract import (
    CommitRequest,
    CommitResult,
    PassPlan,
    PlaceRequest,
    Snapshot,
    fleet_id,
)
from activities.node_contract import ShardRef, StartShard, StartShards
from fleet.metrics import PASS_STEPS, PASSES, REFUSALS, RESTARTS
from fleet.peers import address, fetching, holders, upstream
from fleet.planning import plan
from fleet.reasons import Reason, StepError
from fleet.state import FleetState
from fleet.steps import Plan, Step, StepKind, brief
from fleet.tasks import task_arguments
from runtime.instruments import counter, histogram

MOST_STEPS = 200
"""Of one pass: 200 starts are 600 events of its history and about 300 KiB of its plan; the rest follows at once."""

COMMIT_ATTEMPTS = 5
"""A plan is refused when the fleet moved between snapshot and commit, 20 ms apart; five in a row are a storm, and
the pass is tried again by its retry policy."""

DECIDING = histogram(PASSES)
STEPS = counter(PASS_STEPS)
TURNED_DOWN = counter(REFUSALS)
AGAIN = counter(RESTARTS)


class Place:
    """The planner's way in and out of Temporal."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name=contract.PLACE)
    async def place(self, request: PlaceRequest) -> PassPlan:
        """Plan and commit one pass; an attempt after a crash finds the plan the last one committed."""
        fleet = self._client.get_workflow_handle(fleet_id(request.cell))
        moved: tuple[str, ...] = ()
        began = time.monotonic()
        for _ in range(COMMIT_ATTEMPTS):
            snapshot = await self._snapshot(request.cell)
            if snapshot.committed_by == request.pass_id:
                return pass_plan(snapshot.state, snapshot.committed)
            # In a thread: a plan for thousands of replicas takes seconds, and this loop carries other activities.
            decided = await asyncio.to_thread(plan, snapshot.state, request.now)
            if decided.quiet:
                DECIDING.record(time.monotonic() - began, {"llmgw.outcome": "quiet"})
                return PassPlan(steps=())
            more = len(decided.steps) > MOST_STEPS
            whole, decided = decided, brief(decided, MOST_STEPS)
            committed = await fleet.execute_update(
                contract.UPDATE_COMMIT,
                CommitRequest(pass_id=request.pass_id, plan=decided, more=more),
                result_type=CommitResult,
            )
            if committed.accepted:
                DECIDING.record(time.monotonic() - began, {"llmgw.outcome": "acted"})
                count(snapshot.state, whole.steps[:MOST_STEPS])
                return pass_plan(snapshot.state, decided).model_copy(update={"causes": snapshot.causes})
            moved = committed.moved
        DECIDING.record(time.monotonic() - began, {"llmgw.outcome": "moved"})
        raise StepError(Reason.INTERNAL, f"the fleet moved under every plan of this pass: {', '.join(moved[:5])}")

    async def _snapshot(self, cell: str) -> Snapshot:
        fleet = self._client.get_workflow_handle(fleet_id(cell))
        try:
            snapshot: Snapshot = await fleet.query(contract.QUERY_SNAPSHOT, result_type=Snapshot)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            raise StepError(Reason.BAD_INPUT, f"cell: there is no fleet {cell}") from error
        return snapshot


def count(state: FleetState, steps: Sequence[Step]) -> None:
    """Count the steps of a plan that was just committed, once, with the answer of every node."""
    for step in steps:
        STEPS.add(1, {"llmgw.step": step.kind.value})
        if step.decision is not None and not step.decision.shards:
            for verdict in step.decision.verdicts:
                if verdict.reason is not None:
                    TURNED_DOWN.add(1, {"llmgw.reason": verdict.reason.value})
        failed = state.replicas.get(step.replica)
        if step.kind is StepKind.RESTART and failed is not None and failed.failure is not None:
            model = state.models.get(step.model)
            name = model.spec.name if model is not None else step.model
            AGAIN.add(1, {"llmgw.model": name, "llmgw.reason": failed.failure.reason.value})


def pass_plan(state: FleetState, decided: Plan) -> PassPlan:
    """The plan with what each replica's workflow needs, for the steps that may start one."""
    starts: dict[str, StartShards] = {}
    begun: dict[str, list[str]] = {}
    """By weights: nodes that fetch them, in the order of their starts."""
    for step in decided.steps:
        start = _start(state, step, begun)
        if start is not None:
            starts[step.replica] = start
    return PassPlan(steps=decided.steps, starts=starts)


def _start(state: FleetState, step: Step, begun: dict[str, list[str]]) -> StartShards | None:
    model = state.models.get(step.model)
    record = state.replicas.get(step.replica)
    held = record.shards if record is not None else ()
    shards = step.decision.shards if step.decision is not None else held
    if model is None or not shards:
        return None
    spec = model.spec
    line = begun.setdefault(spec.weights.model_id, fetching(state, spec.weights.model_id))
    having = holders(state, spec.weights.model_id)
    peers = {}
    for shard in shards:
        if shard.node in line:
            line.remove(shard.node)  # it begins anew, behind the others
        peers[shard.node] = tuple(address(state, one) for one in upstream(shard.node, having, line))
        if address(state, shard.node):
            line.append(shard.node)
    return StartShards(
        model=spec.name,
        nodes=tuple(shard.node for shard in shards),
        assignments=shards,
        shards=tuple(
            StartShard(
                shard=ShardRef(replica=step.replica, generation=step.generation, rank=shard.rank),
                model=spec.name,
                engine=spec.engine,
                weights=spec.weights,
                peers=peers[shard.node],
                devices=shard.devices,
                gpus=spec.need.gpus,
                context_length=spec.context_length,
                concurrency=spec.concurrency,
                args=(*task_arguments(spec.engine, spec.task), *spec.args),
                trust_remote_code=spec.trust_remote_code,
                ready_deadline_s=spec.start_deadline_s,
                pipeline_parallel=spec.pipeline_parallel,
            )
            for shard in shards
        ),
        drain_deadline_s=spec.drain_deadline_s,
    )

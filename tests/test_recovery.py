"""Whatever dies or is ended by hand, nothing is lost, sold twice or left running: with nodes that have no engines."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError

from activities import contract, node_contract
from activities.contract import JobState
from activities.node_contract import (
    JoinAnswer,
    LeaseTerms,
    Leave,
    NodeInput,
    Report,
    Reported,
    ShardChange,
    ShardHealth,
    ShardRef,
    StartShard,
)
from activities.rounds import Rounds
from fleet.demand import LOADS_GAP_S
from fleet.reasons import Failure, Reason
from fleet.state import NodeState, Policy, ReplicaState, RestartPolicy
from tests.control import Cell, control_plane
from tests.fleets import fleet, inventory
from tests.test_workflows import SERVE
from tests.waiting import until

QUICK = Policy(restart=RestartPolicy(base_s=0.1, attempts=3), unstarted_after_s=2.0)


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client, policy=QUICK) as made:
        yield made


def rounds_of(cell: Cell) -> Rounds:
    return Rounds(cell.client, cell.name, QUICK, timedelta(seconds=5))


async def test_a_fleet_cannot_be_cancelled(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.fleet.cancel()
        assert (await cell.run(SERVE)).replicas == ("tiny-0",)
        assert (await cell.state()).nodes.keys() == {node.name}


async def test_a_replica_whose_workflow_was_terminated_goes_on_with_its_engine(cell: Cell) -> None:
    rounds = rounds_of(cell)
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        assert await rounds.find_orphans() == []
        await cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name)).terminate("by hand")
        await until(lambda: _orphans(rounds), 20.0)
        again = await cell.replica("tiny-0", ReplicaState.SERVING)
        assert again.generation == 1
        assert [start.shard.generation for start in node.started] == [1, 1]
        handle = cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name))
        assert (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
        await cell.run({"kind": "remove", "name": "tiny"})
        assert node.running == {}


async def test_a_fleet_that_was_terminated_is_started_anew_and_its_nodes_join_it(cell: Cell) -> None:
    rounds = rounds_of(cell)
    async with cell.node("n1") as node:
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        assert not await rounds.ensure_fleet()
        await cell.fleet.terminate("by hand")
        assert await rounds.ensure_fleet()

        async def asked() -> bool:
            await rounds.compare_nodes()
            return not node.attending.is_set()

        await until(asked, 20.0)
        await node.join()
        assert (await cell.state()).nodes.keys() == {node.name}


async def test_a_terminated_replica_is_stopped_on_its_node_all_the_same(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        await cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name)).terminate("by hand")
        await cell.run({"kind": "remove", "name": "tiny"})
        assert node.running == {}


async def test_a_node_of_a_large_fleet_is_told_to_tell_its_loads_more_seldom(cell: Cell) -> None:
    async with cell.node("n1") as node:
        assert (await node.join()).loads_gap_s == LOADS_GAP_S
        large = fleet({f"x{number}": inventory() for number in range(499)})
        await cell.fleet.terminate("replaced")
        await cell.client.start_workflow(
            contract.FLEET_WORKFLOW,
            {"cell": cell.name, "state": large.model_dump(mode="json")},
            id=contract.fleet_id(cell.name),
            task_queue=contract.CONTROL_QUEUE,
        )
        assert (await node.join()).loads_gap_s == 10.0


async def _orphans(rounds: Rounds) -> bool:
    return await rounds.find_orphans() == ["tiny-0"]


async def test_a_drain_nobody_was_told_of_is_said_again(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run({**SERVE, "drain_deadline_s": 0.5})
        # As a pass that died between its commit and its first signal leaves it.
        state = await cell.state()
        lost = state.replicas["tiny-0"].model_copy(update={"state": ReplicaState.DRAINING})
        await cell.fleet.terminate("replaced")
        await cell.client.start_workflow(
            contract.FLEET_WORKFLOW,
            {"cell": cell.name, "state": state.with_replica(lost).model_dump(mode="json")},
            id=contract.fleet_id(cell.name),
            task_queue=contract.CONTROL_QUEUE,
        )
        await cell.run({"kind": "remove", "name": "tiny"})
        # Until the removal comes, a pass may have started another in its place.
        assert node.drained.count(ShardRef(replica="tiny-0", generation=lost.generation)) == 1
        assert node.running == {}


async def test_an_unhealthy_engine_without_a_workflow_is_not_started_twice(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        await cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name)).terminate("by hand")
        (shard,) = node.running
        failure = Failure(reason=Reason.NEVER_READY, detail="it does not answer", node=node.name)
        change = ShardChange(shard=shard, health=ShardHealth.UNHEALTHY, failure=failure)
        report = Report(node=node.name, incarnation=node.incarnation, changes=(change,))
        handle = cell.client.get_workflow_handle(contract.node_id(node.name))
        await handle.execute_update(node_contract.REPORT, report, result_type=Reported)
        assert (await cell.state()).replicas["tiny-0"].state is ReplicaState.SERVING
        assert len(node.started) == 1


async def test_a_node_whose_workflow_was_terminated_with_its_agent_dead_is_lost(cell: Cell) -> None:
    rounds = rounds_of(cell)
    async with cell.node("n1") as node:
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        assert await rounds.compare_nodes() == []
    await cell.client.get_workflow_handle(contract.node_id(node.name)).terminate("by hand")

    async def lost() -> bool:
        await rounds.compare_nodes()
        return (await cell.state()).nodes[node.name].state is NodeState.LOST

    await until(lost, 20.0)


async def test_a_join_that_is_being_answered_keeps_the_node_from_being_lost(cell: Cell) -> None:
    terms = LeaseTerms(heartbeat_timeout_s=2, grace_s=0)
    async with cell.node("n1", terms=terms) as node:
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        handle = cell.client.get_workflow_handle(contract.node_id(node.name))
        for _ in range(5):  # the lease closes, no grace is left, and the same agent joins at that moment
            await handle.signal(node_contract.SIGNAL_REJOIN, node_contract.Rejoin(cell=cell.name))
            await node.join()
        await asyncio.wait_for(node.attending.wait(), 20)
        assert (await cell.state()).nodes[node.name].state is NodeState.READY


async def test_an_agent_is_told_whether_it_comes_back_or_asks_again(cell: Cell) -> None:
    terms = LeaseTerms(heartbeat_timeout_s=2, grace_s=30)
    async with cell.node("n1", terms=terms) as node:
        assert (await node.join()).returned
        await asyncio.wait_for(node.attending.wait(), 10)
        assert not (await node.join()).returned, "it was a member all the time"
        handle = cell.client.get_workflow_handle(contract.node_id(node.name))
        await handle.signal(node_contract.SIGNAL_REJOIN, node_contract.Rejoin(cell=cell.name))
        await until(lambda: not node.attending.is_set(), 20.0)
        assert (await node.join()).returned, "its lease was closed"
    async with cell.node("n1", terms=terms) as later:
        assert (await later.join()).returned, "another process"


async def test_an_agent_that_leaves_before_its_lease_is_open_is_told_lost_once(cell: Cell) -> None:
    name = f"n1-{cell.name}"
    # As a run begins that took over from one whose agent was a member.
    taken_over = NodeInput(node=name, cell=cell.name, incarnation="i", wanted=True)
    await cell.client.execute_update_with_start_workflow(
        node_contract.LEAVE,
        Leave(node=name, incarnation="i"),
        start_workflow_operation=WithStartWorkflowOperation(
            node_contract.NODE_WORKFLOW,
            taken_over,
            id=contract.node_id(name),
            task_queue=contract.CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
        ),
        result_type=Reported,
    )
    handle = cell.client.get_workflow_handle(contract.node_id(name))
    await asyncio.wait_for(handle.result(), 20)
    history = await handle.fetch_history()
    told = [
        event for event in history.events if event.HasField("external_workflow_execution_signaled_event_attributes")
    ]
    assert len(told) == 1


async def test_a_node_takes_more_reports_than_one_run_can(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        await cell.run(SERVE)
        handle = cell.client.get_workflow_handle(contract.node_id(node.name))
        first = (await handle.describe()).run_id
        sent = 0

        async def renewed() -> bool:
            nonlocal sent
            for _ in range(50):
                report = Report(node=node.name, incarnation=node.incarnation)
                try:
                    await handle.execute_update(node_contract.REPORT, report, result_type=Reported)
                    sent += 1
                except WorkflowUpdateFailedError:
                    await node.join()  # as an agent does whose lease is not the current one
            return (await handle.describe()).run_id != first

        await until(renewed, 100.0)
        assert sent > 500
        await until(lambda: node.attending.is_set(), 20.0)
        await node.join()
        state = await cell.state()
        assert state.nodes[node.name].state is NodeState.READY
        assert state.replicas["tiny-0"].state is ReplicaState.SERVING
        assert len(node.started) == 1


async def test_another_machine_cannot_take_the_name_of_a_node_that_is_held(cell: Cell) -> None:
    async with cell.node("n1") as node:
        node.machine = "one"
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        twin = cell.node("n1")
        twin.machine = "two"
        with pytest.raises(WorkflowUpdateFailedError) as caught:
            await twin.join()
        assert isinstance(caught.value.cause, ApplicationError)
        assert caught.value.cause.type == node_contract.NAME_TAKEN
        assert (await cell.state()).nodes[node.name].incarnation == node.incarnation


async def test_a_reason_this_worker_does_not_know_is_a_failure_like_any_other(cell: Cell) -> None:
    async def broken(request: StartShard) -> None:
        sent = {"reason": "flux_capacitor", "detail": "flux"}
        raise ApplicationError("flux", sent, type="flux_capacitor", non_retryable=True)

    async with cell.node("n1", start=broken) as node:
        await node.join()
        job = await cell.start(SERVE)
        with pytest.raises(WorkflowFailureError) as caught:
            await job.result()
        assert isinstance(caught.value.cause, ApplicationError)
        assert caught.value.cause.type == Reason.INTERNAL
        assert "flux" in caught.value.cause.message
        assert (await cell.state()).replicas["tiny-0"].shards == ()


async def test_a_cancelled_job_leaves_a_model_that_another_job_wants(cell: Cell) -> None:
    gate = asyncio.Event()

    async def slow(request: StartShard) -> None:
        await gate.wait()

    async with cell.node("n1", start=slow) as node:
        await node.join()
        first = await cell.start(SERVE)
        await until(lambda: bool(node.started))
        second = await cell.start(SERVE)

        async def queued() -> bool:
            return (await cell.status(second)).steps[0].detail == f"waits for {first.id} on the same model"

        await until(queued, 30.0)
        await first.cancel()
        with pytest.raises(WorkflowFailureError):
            await first.result()
        assert (await cell.status(first)).state is JobState.CANCELLED
        gate.set()
        assert (await second.result()).replicas == ("tiny-0",)


async def test_a_fleet_tells_a_node_it_does_not_know_to_join_again(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        await cell.fleet.terminate("by hand")
        await cell.client.start_workflow(
            contract.FLEET_WORKFLOW,
            {"cell": cell.name},
            id=contract.fleet_id(cell.name),
            task_queue=contract.CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        handle = cell.client.get_workflow_handle(contract.node_id(node.name))
        report = Report(node=node.name, incarnation=node.incarnation, inventory=inventory(cpus=3))
        await handle.execute_update(node_contract.REPORT, report, result_type=Reported)
        await until(lambda: not node.attending.is_set(), 20.0)
        answer: JoinAnswer = await node.join()
        assert answer.claimed == ()
        assert (await cell.state()).nodes.keys() == {node.name}


async def test_a_large_fleet_is_planned_in_parts_that_fit_into_a_payload(cell: Cell) -> None:
    """150 members that nobody attends, and more replicas than one pass may start: nothing is refused for its size."""
    for number in range(150):
        await cell.fleet.signal(
            "node_joined",
            {
                "node": f"m{number:03}-{cell.name}",
                "incarnation": "i1",
                "inventory": inventory(gpus=(2**34,) * 8).model_dump(mode="json"),
            },
        )
    await cell.start({**SERVE, "replicas": 300})

    async def reserved() -> bool:
        return len((await cell.state()).replicas) == 300

    await until(reserved, 120.0)
    state = await cell.state()
    assert {replica.state for replica in state.replicas.values()} <= {ReplicaState.PLACED, ReplicaState.STARTING}
    assert max(len(replica.nodes) for replica in state.replicas.values()) == 1
    decision = state.models["tiny"].decision
    assert decision is not None
    assert len(decision.verdicts) == 4


async def test_a_node_of_another_cell_is_asked_once_and_does_not_mind(cell: Cell) -> None:
    name = f"stranger-{cell.name}"
    stranger: WorkflowHandle[Any, Any] = await cell.client.start_workflow(
        node_contract.NODE_WORKFLOW,
        node_contract.NodeInput(node=name, cell="elsewhere"),
        id=contract.node_id(name),
        task_queue=contract.CONTROL_QUEUE,
    )
    rounds = rounds_of(cell)

    async def compared() -> bool:
        return stranger.id in await rounds.compare_nodes()

    await until(compared, 20.0)
    assert stranger.id in await rounds.compare_nodes()
    history = await stranger.fetch_history()
    signals = [event for event in history.events if event.HasField("workflow_execution_signaled_event_attributes")]
    assert len(signals) == 1

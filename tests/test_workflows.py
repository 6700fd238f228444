"""The workflows together on a real server, with nodes that have no engines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.exceptions import ApplicationError, CancelledError

from activities import contract
from activities.contract import (
    Done,
    JobState,
    NameArg,
    PassPlan,
    Routes,
    ScaleArg,
    StepState,
)
from activities.node_contract import ShardChange, ShardHealth, ShardRef, StartShard
from fleet.reasons import Failure, Reason, StepError
from fleet.state import NodeState, Policy, ReplicaState, RestartPolicy
from tests.control import Answers, Cell, control_plane
from tests.fleets import GIB
from tests.waiting import until

SERVE: dict[str, Any] = {"repo": "file:/models/tiny.gguf", "name": "tiny"}


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    policy = Policy(restart=RestartPolicy(base_s=0.1, attempts=3))
    async with control_plane(client, policy=policy) as made:
        yield made


async def failure_of(job: WorkflowHandle[Any, Any]) -> ApplicationError:
    with pytest.raises(WorkflowFailureError) as caught:
        await job.result()
    assert isinstance(caught.value.cause, ApplicationError), caught.value.cause
    return caught.value.cause


async def test_serve_and_remove(cell: Cell) -> None:
    async with cell.node("n1") as node:
        assert (await node.join()).claimed == ()
        job = await cell.start({**SERVE, "replicas": 2})
        result = await job.result()
        assert result.sentence == f"tiny is serving: 2 replicas on {node.name}"
        assert result.replicas == ("tiny-0", "tiny-1")
        assert result.smoke_test is not None
        assert result.smoke_test.answer == "Paris."
        status = await cell.status(job)
        assert status.state is JobState.DONE
        assert [(row.name, row.state) for row in status.steps] == [(name, StepState.DONE) for name in contract.STEPS]
        assert all(row.detail and row.ended_at >= row.started_at > 0 for row in status.steps)
        assert status.trace == ""
        details = await job.describe()
        assert details.typed_search_attributes is not None
        routes: Routes = await cell.fleet.query(contract.QUERY_ROUTES, result_type=Routes)
        assert [(route.model, len(route.endpoints)) for route in routes.routes] == [("tiny", 2)]

        removed = await cell.run({"kind": "remove", "name": "tiny"})
        assert removed.sentence == "tiny is removed: its replicas are drained and stopped"
        assert sorted(ref.replica for ref in node.drained) == ["tiny-0", "tiny-1"]
        assert sorted(ref.replica for ref in node.stopped) == ["tiny-0", "tiny-1"]
        state = await cell.state()
        assert (state.models, state.replicas) == ({}, {})


async def test_the_same_serve_twice_is_one_model(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        second = await cell.start(SERVE)
        await second.result()
        catalog = (await cell.status(second)).steps[3]
        assert catalog.detail == "tiny is in the catalog already, unchanged"
        assert len(node.started) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replcas": 1}, "replcas: Extra inputs are not permitted"),
        ({"repo": ""}, "repo: String should have at least 1 character"),
        ({"repo": "x/y", "replicas": "two"}, "replicas: Input should be a valid integer, unable to parse"),
        ({"repo": "x/y", "memory": "lots"}, "memory: a size is more than 0, in bytes or with a unit such as 12GiB"),
        ({"repo": "x/y", "memory": 0}, "memory: a size is more than 0"),
        ({"repo": "x/y", "gpus": True}, "gpus: a number is needed, not true or false"),
        ({"repo": "x/y", "name": "a\nb"}, "name: a name has no line breaks, control characters"),
        ("x", "input: Input should be an object with fields"),
        ({"kind": "surve"}, "kind: Input should be 'serve', 'mirror', 'update' or 'remove'"),
        ({"kind": "remove"}, "name: a remove job needs the name of a model"),
        ({}, 'repo: Field required, such as {"repo": "file:/models/model.gguf"}'),
        (None, 'repo: Field required, such as {"repo": "file:/models/model.gguf"}'),
        ({"repo": "ftp://x/y"}, "repo 'ftp://x/y' is no repo"),
    ],
)
async def test_a_wrong_input_fails_at_once_and_names_the_field(cell: Cell, given: Any, message: str) -> None:
    job = await cell.start(given)
    failure = await failure_of(job)
    assert failure.type == Reason.BAD_INPUT
    assert failure.message.startswith(message)
    status = await cell.status(job)
    assert status.state is JobState.FAILED
    assert status.steps[0].state is StepState.FAILED
    assert message in status.steps[0].detail


async def test_two_inputs_fail_at_once(cell: Cell) -> None:
    job: WorkflowHandle[Any, Any] = await cell.client.start_workflow(
        contract.MODEL_JOB_WORKFLOW, args=[SERVE, {}], id=f"two-{cell.name}", task_queue=contract.CONTROL_QUEUE
    )
    assert (await failure_of(job)).message.startswith("input: a ModelJob takes one input, not 2")


async def test_scaling_down_is_done_when_the_surplus_is_gone(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run({**SERVE, "replicas": 3})
        job = await cell.start(SERVE)
        assert (await job.result()).sentence == f"tiny is serving: 1 replica on {node.name}"
        assert (await cell.status(job)).steps[3].detail == ("tiny changed, and what serves goes on: replicas 3 → 1")
        assert len(node.running) == 1


async def test_a_changed_spec_is_served_by_its_own_version_when_the_job_is_done(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        result = await cell.run({**SERVE, "context_length": 4096})
        assert result.replicas == ("tiny-1",)
        assert [shard.replica for shard in node.running] == ["tiny-1"]


async def test_a_pass_in_a_cell_that_is_not_there_is_refused(cell: Cell) -> None:
    with pytest.raises(WorkflowFailureError) as caught:
        await cell.client.execute_workflow(
            contract.RECONCILE_WORKFLOW,
            {"cell": "nowhere"},
            id=contract.reconcile_id("nowhere"),
            task_queue=contract.CONTROL_QUEUE,
        )
    assert "there is no fleet nowhere" in str(caught.value.cause.__cause__)


async def test_a_step_that_fails_is_failed_with_its_cause(client: Client) -> None:
    errors = {contract.CHECK_FIT: StepError(Reason.WEIGHTS_UNREADABLE, "tiny.gguf is truncated")}
    async with control_plane(client, answers=Answers(errors=errors)) as cell:
        job = await cell.start(SERVE)
        failure = await failure_of(job)
        assert failure.type == Reason.WEIGHTS_UNREADABLE
        assert failure.message.startswith("tiny.gguf is truncated — ")
        status = await cell.status(job)
        assert status.state is JobState.FAILED
        assert status.failure is not None
        assert status.failure.reason is Reason.WEIGHTS_UNREADABLE
        assert [row.state for row in status.steps] == ["done", "done", "failed", "pending", "pending", "pending"]
        assert "weights_unreadable: tiny.gguf is truncated" in status.steps[2].detail
        assert (await cell.state()).models == {}


async def test_a_mirror_job_ends_with_the_mirror(cell: Cell) -> None:
    job = await cell.start({**SERVE, "kind": "mirror"})
    assert (await job.result()).sentence == "tiny: copied 1 GiB in 2.0 s (512 MiB/s)"
    rows = (await cell.status(job)).steps
    assert [row.state for row in rows] == ["done", "done", "skipped", "skipped", "skipped", "skipped"]


async def test_a_job_waits_for_room_and_says_why(cell: Cell) -> None:
    job = await cell.start(SERVE)

    async def detail() -> str:
        return (await cell.status(job)).steps[4].detail

    await until(lambda: _is(detail, "0/0 nodes fit tiny: no node has joined the fleet"))
    async with cell.node("n1", memory=GIB // 2) as small:
        await small.join()
        await until(
            lambda: _is(detail, f"0/1 nodes fit tiny: 1 memory (need 1 GiB, best free 512 MiB on {small.name})")
        )
        async with cell.node("n2") as large:
            await large.join()
            assert (await job.result()).sentence == f"tiny is serving: 1 replica on {large.name}"


async def _is(read: Any, text: str) -> bool:
    return bool(await read() == text)


async def test_an_engine_that_exits_is_restarted_with_a_new_generation(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        (first,) = node.running
        await node.report_exit(first, Failure(reason=Reason.EXITED, detail="killed by signal 9", node=node.name))
        again = await cell.replica("tiny-0", ReplicaState.SERVING, generation=first.generation)
        assert len(again.failures) == 1
        assert list(node.running) == [ShardRef(replica="tiny-0", generation=again.generation)]


async def test_a_start_that_never_works_is_given_up_and_the_job_says_why(cell: Cell) -> None:
    async def broken(request: StartShard) -> None:
        raise StepError(Reason.EXITED, "the engine exited with code 1: boom")

    async with cell.node("n1", start=broken) as node:
        await node.join()
        job = await cell.start(SERVE)
        failure = await failure_of(job)
        assert failure.type == Reason.EXITED
        assert failure.message.startswith(f"the engine exited with code 1: boom (on {node.name})")
        assert len(node.started) == 3
        state = await cell.state()
        assert state.replicas["tiny-0"].given_up
        assert state.replicas["tiny-0"].shards == ()
        await cell.run({"kind": "remove", "name": "tiny"})


async def test_cancelling_a_job_takes_back_what_it_put_in(cell: Cell) -> None:
    starting = asyncio.Event()

    async def slow(request: StartShard) -> None:
        starting.set()
        await asyncio.Event().wait()

    async with cell.node("n1", start=slow) as node:
        await node.join()
        job = await cell.start(SERVE)
        await starting.wait()
        await job.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await job.result()
        assert isinstance(caught.value.cause, CancelledError)
        assert (await cell.status(job)).state is JobState.CANCELLED
        await until(lambda: _gone(cell), 30.0)


async def _gone(cell: Cell) -> bool:
    state = await cell.state()
    return not state.models and not state.replicas


async def test_an_agent_that_returns_keeps_what_it_runs(cell: Cell) -> None:
    async with cell.node("n1") as first:
        await first.join()
        await cell.run(SERVE)
        running = dict(first.running)
    async with cell.node("n1") as second:  # a new incarnation of the same node
        second.running = {**running, ShardRef(replica="stranger-0", generation=7): next(iter(running.values()))}
        second.running[ShardRef(replica="stranger-0", generation=7)] = next(iter(running.values())).model_copy(
            update={"shard": ShardRef(replica="stranger-0", generation=7)}
        )
        assert (await second.join()).claimed == tuple(running)
        await asyncio.wait_for(second.attending.wait(), 10)
        state = await cell.state()
        assert state.nodes[second.name].incarnation == second.incarnation
        assert state.replicas["tiny-0"].state is ReplicaState.SERVING
        assert second.started == []


async def test_after_a_reboot_what_ran_is_started_again(cell: Cell) -> None:
    async with cell.node("n1") as first:
        await first.join()
        await cell.run(SERVE)
    async with cell.node("n1") as second:
        await second.join()
        again = await cell.replica("tiny-0", ReplicaState.SERVING, generation=1)
        assert again.nodes == (second.name,)
        assert [start.shard.generation for start in second.started] == [again.generation]
        assert again.failure is not None
        assert again.failure.detail == "it does not run any more on the returning node"


async def test_why_an_engine_ended_while_no_agent_was_there_is_told_by_the_next(cell: Cell) -> None:
    async with cell.node("n1") as first:
        await first.join()
        await cell.run(SERVE)
        (shard,) = first.running
    async with cell.node("n1") as second:
        cause = Failure(reason=Reason.OUT_OF_MEMORY, detail="no memory", node=second.name)
        second.ended = (ShardChange(shard=shard, health=ShardHealth.EXITED, failure=cause),)
        await second.join()
        again = await cell.replica("tiny-0", ReplicaState.SERVING, generation=1)
        assert again.failure == cause
        await second.report_exit(shard, cause)  # as its agent does all the same: it changes nothing
        assert (await cell.state()).replicas["tiny-0"] == again


async def test_a_silent_node_is_lost_and_its_replica_goes_elsewhere(cell: Cell) -> None:
    async with cell.node("n2") as other:
        async with cell.node("n1") as node:
            await node.join()
            await cell.run(SERVE)
            await other.join()
        moved = await cell.replica("tiny-0", ReplicaState.SERVING, generation=1)
        assert moved.nodes == (other.name,)
        state = await cell.state()
        assert state.nodes[node.name].state is NodeState.LOST
        assert state.nodes[node.name].cause == "its agent is silent"
        # When it comes back, its old copy is not claimed.
        async with cell.node("n1") as back:
            back.running = dict(node.running)
            assert (await back.join()).claimed == ()


async def test_an_agent_that_leaves_is_lost_at_once(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await asyncio.wait_for(node.attending.wait(), 10)
        await node.leave()

        async def lost() -> bool:
            return (await cell.state()).nodes[node.name].state is NodeState.LOST

        await until(lost)
        stale = Failure(reason=Reason.EXITED, detail="late")
        with pytest.raises(Exception) as caught:
            await node.report_exit(ShardRef(replica="tiny-0", generation=1), stale)
        assert not isinstance(caught.value, AssertionError)


async def test_a_node_that_contradicts_itself_is_told_so_and_is_no_member(cell: Cell) -> None:
    async with cell.node("n1") as node:
        [cpu] = node.inventory.devices
        node.inventory = node.inventory.model_copy(update={"devices": (cpu, cpu)})
        with pytest.raises(WorkflowUpdateFailedError) as caught:
            await node.join()
        refusal = caught.value.cause
        assert isinstance(refusal, ApplicationError)
        assert refusal.type == Reason.BAD_INPUT
        assert refusal.message.startswith(f"node {node.name} may not join: 2 devices have the uuid cpu")
        assert (await cell.state()).nodes == {}
        node.inventory = node.inventory.model_copy(update={"devices": (cpu,)})
        await node.join()
        assert list((await cell.state()).nodes) == [node.name]


async def test_what_people_change_is_checked_before_it_is_an_event(cell: Cell) -> None:
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await cell.fleet.execute_update(contract.UPDATE_SCALE, ScaleArg(name="nope", replicas=2), result_type=Done)
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.message.startswith("no model is named nope; there are: none")
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        done: Done = await cell.fleet.execute_update(contract.UPDATE_CORDON, NameArg(name=node.name), result_type=Done)
        assert done.sentence == f"node {node.name} is cordoned"
        await cell.fleet.execute_update(contract.UPDATE_SCALE, ScaleArg(name="tiny", replicas=2), result_type=Done)

        async def waiting() -> str:
            return (await cell.state()).models["tiny"].waiting

        await until(lambda: _is(waiting, "0/1 nodes fit tiny: 1 node_cordoned"))
        await cell.fleet.execute_update(contract.UPDATE_UNCORDON, NameArg(name=node.name), result_type=Done)
        await cell.replica("tiny-1", ReplicaState.SERVING)


async def test_a_person_may_run_a_pass(cell: Cell) -> None:
    plan: PassPlan = await cell.client.execute_workflow(
        contract.RECONCILE_WORKFLOW,
        {"cell": cell.name},
        id=contract.reconcile_id(cell.name),
        task_queue=contract.CONTROL_QUEUE,
        result_type=PassPlan,
    )
    assert plan.steps == ()


async def test_without_a_cache_every_task_replays_and_nothing_changes(client: Client) -> None:
    async with control_plane(client, cached=0) as cell:
        async with cell.node("n1") as node:
            await node.join()
            assert (await cell.run(SERVE)).replicas == ("tiny-0",)
            await cell.run({"kind": "remove", "name": "tiny"})
            assert len(node.started) == len(node.stopped) == 1


async def test_no_history_event_carries_a_header_while_tracing_is_off(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        job = await cell.start(SERVE)
        await job.result()
        for workflow in (job.id, contract.fleet_id(cell.name), contract.replica_id("tiny-0", cell.name)):
            history = await cell.client.get_workflow_handle(workflow).fetch_history()
            assert len(history.events) > 3
            assert not [event for event in history.events if "tracer" in str(event)]

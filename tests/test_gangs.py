"""A replica over several nodes, on a real server with nodes that have no engines: all of it, or none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import combinations
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError

from activities import contract
from activities.contract import QUERY_ROUTES, Routes
from activities.node_contract import PortHolder, ShardRef, StartShard
from fleet.gangs import passed_over
from fleet.reasons import Failure, Reason, StepError
from fleet.state import Policy, ReplicaRecord, ReplicaState, RestartPolicy
from tests.control import Cell, control_plane
from tests.light_node import LightNode, at_once
from tests.waiting import until
from workflows.gang import PORT_ROUNDS

SERVE: dict[str, Any] = {"repo": "org/tiny", "name": "tiny", "nodes": 2}
Start = Callable[[StartShard], Awaitable[None]]


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    policy = Policy(restart=RestartPolicy(base_s=0.1, attempts=3))
    async with control_plane(client, policy=policy) as made:
        yield made


@pytest.fixture
async def nodes(cell: Cell) -> AsyncIterator[list[LightNode]]:
    """Two members. Placement prefers the first name where both are equal: n1 has rank 0."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(cell.node(name)) for name in ("n1", "n2")]
        for node in made:
            await node.join()
        yield made


async def two_of_which_one_leaves(
    cell: Cell, stack: AsyncExitStack, lost: int
) -> tuple[list[LightNode], AsyncExitStack]:
    """Two members as `nodes` has them, and what ends the one with the index `lost`; `stack` ends the other."""
    leaving, made = AsyncExitStack(), list[LightNode]()
    for index, name in enumerate(("n1", "n2")):
        into = leaving if index == lost else stack
        made.append(await into.enter_async_context(cell.node(name)))
        await made[-1].join()
    return made, leaving


def fails(reason: Reason, detail: str, *, after: Callable[[], Awaitable[None]] | None = None) -> Start:
    async def start(request: StartShard) -> None:
        if after is not None:
            await after()
        raise StepError(reason, detail)

    return start


async def heard(cell: Cell, event: EventType.ValueType) -> None:
    """Wait until the replica's workflow was told of such an event, and has decided what follows from it."""

    async def decided() -> bool:
        handle = cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name))
        kinds = [one.event_type for one in (await handle.fetch_history()).events]
        return event in kinds and EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED in kinds[kinds.index(event) :]

    await until(decided, 30.0)


async def for_ever(request: StartShard) -> None:
    await asyncio.Event().wait()


async def given_up(cell: Cell) -> Failure:
    """The failure of a replica that is not tried again."""

    async def there() -> ReplicaRecord | None:
        found = (await cell.state()).replicas.get("tiny-0")
        return found if found is not None and found.given_up else None

    found = await until(there, 60.0)
    assert found is not None
    assert found.failure is not None
    assert found.shards == ()
    return found.failure


def whole(nodes: list[LightNode], generation: int) -> bool:
    """Whether exactly this generation runs, one shard on each."""
    return [list(node.running) for node in nodes] == [
        [ShardRef(replica="tiny-0", generation=generation, rank=rank)] for rank in range(len(nodes))
    ]


# -- start ------------------------------------------------------------------------------------------------------------


async def test_all_shards_start_together_and_end_together(cell: Cell, nodes: list[LightNode]) -> None:
    async def prepare_late(request: StartShard) -> None:
        await heard(cell, EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED)  # that the other is prepared
        assert nodes[0].started == [], "no engine starts before every node has what it needs"

    nodes[1].prepare = prepare_late
    await cell.run(SERVE)
    assert whole(nodes, 1)
    assert [len(node.prepared) for node in nodes] == [1, 1]
    assert [len(node.reserved) for node in nodes] == [1, 0], "rank 0's node gives the port"
    assert [[one.port for one in node.checked] for node in nodes] == [[], [21000]], "and the other looks at it"
    places = [node.started[0].gang for node in nodes]
    assert places[0] is not None
    assert places[0] == places[1]
    assert (places[0].nodes, places[0].port) == (tuple(node.name for node in nodes), 21000)
    routes: Routes = await cell.fleet.query(QUERY_ROUTES, result_type=Routes)
    (route,) = routes.routes
    assert route.endpoints == (f"http://{nodes[0].name}/tiny-0",), "one door: rank 0"
    await cell.run({"kind": "remove", "name": "tiny"})
    assert [len(node.drained) for node in nodes] == [1, 0]
    assert [node.running for node in nodes] == [{}, {}]


async def test_a_node_that_cannot_be_prepared_keeps_all_from_starting(cell: Cell, nodes: list[LightNode]) -> None:
    nodes[1].prepare = fails(Reason.DISK_FULL, "the disk is full")
    await cell.start(SERVE)
    failure = await given_up(cell)
    assert (failure.reason, failure.node) == (Reason.DISK_FULL, nodes[1].name)
    assert [node.started for node in nodes] == [[], []]


async def test_one_that_fails_ends_the_start_of_all(cell: Cell, nodes: list[LightNode]) -> None:
    nodes[0].start = for_ever
    nodes[1].start = fails(Reason.BAD_FLAG, "bad flag")
    await cell.start(SERVE)
    failure = await given_up(cell)
    assert (failure.reason, failure.node) == (Reason.BAD_FLAG, nodes[1].name)
    assert [len(node.stopped) for node in nodes] == [1, 1]
    assert [node.running for node in nodes] == [{}, {}]


async def test_the_cause_is_told_though_its_echo_comes_first(cell: Cell, nodes: list[LightNode]) -> None:
    nodes[0].start = fails(Reason.RENDEZVOUS, "a peer closed the connection")

    async def told() -> None:
        await heard(cell, EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED)

    nodes[1].start = fails(Reason.BAD_FLAG, "bad flag", after=told)
    await cell.start(SERVE)
    failure = await given_up(cell)
    assert (failure.reason, failure.detail, failure.node) == (Reason.BAD_FLAG, "bad flag", nodes[1].name)


async def test_a_port_that_is_taken_is_replaced_in_the_same_start(cell: Cell, nodes: list[LightNode]) -> None:
    async def once(request: StartShard) -> None:
        if len(nodes[0].started) == 1:
            raise StepError(Reason.PORT_IN_USE, "taken")

    async def until_cancelled(request: StartShard) -> None:
        if len(nodes[1].started) == 1:
            await for_ever(request)

    nodes[0].start, nodes[1].start = once, until_cancelled
    await cell.run(SERVE)
    assert whole(nodes, 1)
    assert [request.avoid for request in nodes[0].reserved] == [(), (21000,)]
    assert [start.gang.port for start in nodes[1].started if start.gang] == [21000, 21001]


async def test_a_port_taken_on_another_node_is_replaced_before_any_engine_starts(
    cell: Cell, nodes: list[LightNode]
) -> None:
    nodes[0].taken = {21000: PortHolder(port=21000, pid=11, name="nginx")}
    nodes[1].taken = {port: PortHolder(port=port, pid=123, name="python3") for port in (21001, 21002)}
    await cell.run(SERVE)
    assert whole(nodes, 1)
    assert [request.avoid for request in nodes[0].reserved] == [(), (21000, 21001, 21002)]
    assert [request.port for request in nodes[1].checked] == [21001, 21003]
    assert [[start.gang.port for start in node.started if start.gang] for node in nodes] == [[21003], [21003]]


async def test_a_port_kept_for_another_gang_is_left_by_more_than_one(cell: Cell, nodes: list[LightNode]) -> None:
    nodes[1].taken = {21000: PortHolder(port=21000)}
    await cell.run(SERVE)
    assert whole(nodes, 1)
    first = 21001 + passed_over("tiny-0", 1)
    assert first > 21001, "this name's hash leaves some out"
    assert [request.avoid for request in nodes[0].reserved] == [(), tuple(range(21000, first))]
    assert [request.port for request in nodes[1].checked] == [21000, first]


def test_gangs_that_choose_in_step_part() -> None:
    """Each is led by a node of the other, and has what the other proposes."""
    for one, other in combinations([f"m-{number}" for number in range(60)], 2):
        tried, at = {one: 0, other: 0}, {one: 21000, other: 21000}
        rounds = 1
        while at[one] == at[other]:
            rounds += 1
            for gang in (one, other):
                left_out = passed_over(gang, tried[gang] + 1)
                tried[gang] += 1 + left_out
                at[gang] += 1 + left_out
        assert rounds <= PORT_ROUNDS, (one, other)


async def test_a_port_that_no_node_of_the_gang_agrees_on_is_given_up_and_named(
    cell: Cell, nodes: list[LightNode]
) -> None:
    """Each proposes what the other has: it ends after so many rounds, and Fleet tries again."""
    for index, node in enumerate(nodes):
        node.taken = {port: PortHolder(port=port, pid=7, name="x") for port in range(21000 + index, 21100, 2)}
    await cell.start(SERVE)
    failure = await given_up(cell)
    last = 21000 + 2 * PORT_ROUNDS - 1
    assert (failure.reason, failure.node) == (Reason.PORT_IN_USE, nodes[1].name)
    assert failure.detail == (
        f"port {last} is taken on {nodes[1].name} by pid 7 (x), and no port was free on every node "
        f"in {PORT_ROUNDS} tries"
    )
    assert [node.started for node in nodes] == [[], []], "no engine was started"


async def test_a_cancelled_job_leaves_nothing_on_any_node(cell: Cell, nodes: list[LightNode]) -> None:
    nodes[0].start = for_ever
    job = await cell.start(SERVE)
    await until(lambda: nodes[0].started and nodes[1].running, 30.0)
    await job.cancel()
    with pytest.raises(WorkflowFailureError):
        await job.result()
    await until(lambda: [len(node.stopped) for node in nodes] == [1, 1], 30.0)
    assert [node.running for node in nodes] == [{}, {}]


# -- life -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
async def test_one_shards_death_restarts_the_whole_replica_once(cell: Cell, nodes: list[LightNode], rank: int) -> None:
    await cell.run(SERVE)
    first = ShardRef(replica="tiny-0", generation=1, rank=rank)
    await nodes[rank].report_exit(first, Failure(reason=Reason.ENGINE_GONE, detail="killed", node=nodes[rank].name))
    again = await cell.replica("tiny-0", ReplicaState.SERVING, generation=1)
    assert again.generation == 2
    assert len(again.failures) == 1
    assert whole(nodes, 2)
    assert [[shard.generation for shard in node.stopped] for node in nodes] == [[1], [1]]


async def test_the_cause_of_an_end_is_told_after_its_echo(cell: Cell, nodes: list[LightNode]) -> None:
    await cell.run(SERVE)
    head, other = (ShardRef(replica="tiny-0", generation=1, rank=rank) for rank in (0, 1))
    nodes[0].start = for_ever  # so that the failure stays to be read
    await nodes[0].report_exit(head, Failure(reason=Reason.EXITED, detail="core died", node=nodes[0].name))
    await nodes[1].report_exit(other, Failure(reason=Reason.OUT_OF_MEMORY, detail="no memory", node=nodes[1].name))

    async def failed() -> Failure | None:
        return (await cell.state()).replicas["tiny-0"].failure

    found = await until(failed, 30.0)
    assert found is not None
    assert (found.reason, found.node) == (Reason.OUT_OF_MEMORY, nodes[1].name)


async def test_the_return_of_one_agent_changes_nothing(cell: Cell) -> None:
    async with cell.node("n1") as head:
        await head.join()
        async with cell.node("n2") as first:
            await first.join()
            await cell.run(SERVE)
            running = dict(first.running)
        async with cell.node("n2") as second:
            second.running = running
            assert (await second.join()).claimed == tuple(running)
            await asyncio.wait_for(second.attending.wait(), 10)
            assert second.started == []
            assert head.stopped == []
            state = (await cell.state()).replicas["tiny-0"]
            assert (state.state, state.generation) == (ReplicaState.SERVING, 1)


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_lost_node_takes_the_whole_replica_and_it_is_placed_anew(cell: Cell, lost: int) -> None:
    async with AsyncExitStack() as stack:
        made, leaving = await two_of_which_one_leaves(cell, stack, lost)
        await cell.run(SERVE)
        spare = await stack.enter_async_context(cell.node("n3"))
        await spare.join()
        survivor = made[1 - lost]
        free_at_start: list[bool] = []

        async def look(request: StartShard) -> None:
            free_at_start.append(not survivor.running)

        survivor.start = look
        await leaving.aclose()
        again = await cell.replica("tiny-0", ReplicaState.SERVING, generation=1)
        assert set(again.nodes) == {survivor.name, spare.name}
        assert [shard.generation for shard in survivor.stopped] == [1], "its part serves nobody without the other"
        assert free_at_start == [True]
        assert again.failures == (), "the node is to blame"
        async with cell.node(("n1", "n2")[lost]) as back:
            back.running = dict(made[lost].running)
            assert (await back.join()).claimed == ()


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_node_that_dies_at_the_rendezvous_ends_the_start_on_all(cell: Cell, lost: int) -> None:
    async with AsyncExitStack() as stack:
        made, leaving = await two_of_which_one_leaves(cell, stack, lost)
        survivor, cancelled = made[1 - lost], asyncio.Event()

        async def waits(request: StartShard) -> None:
            try:
                await for_ever(request)
            finally:
                cancelled.set()

        made[lost].start, survivor.start = for_ever, waits
        job = await cell.start(SERVE)
        await until(lambda: all(node.started for node in made), 30.0)
        await leaving.aclose()
        await asyncio.wait_for(cancelled.wait(), 30)
        await until(lambda: survivor.stopped, 30.0)
        assert [shard.generation for shard in survivor.stopped] == [1]
        assert survivor.running == {}
        survivor.start = at_once
        spare = await stack.enter_async_context(cell.node("n3"))
        await spare.join()
        assert (await job.result()).model == "tiny"
        again = await cell.replica("tiny-0", ReplicaState.SERVING, generation=1)
        assert set(again.nodes) == {survivor.name, spare.name}
        assert again.failures == (), "the node is to blame"


async def test_without_a_node_for_each_shard_none_starts(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        job = await cell.start({**SERVE, "room_deadline_s": 0.5})
        with pytest.raises(WorkflowFailureError) as caught:
            await job.result()
        assert "gang_incomplete" in str(caught.value.cause)
        assert node.prepared == []

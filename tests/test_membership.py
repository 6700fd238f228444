"""The agent's membership on a real server: joined, joined again, reported until taken. The node's workflow is a small
stand-in that can be told to misbehave."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from temporalio.workflow import ActivityCancellationType

from activities import contract, node_contract
from activities.node_contract import (
    AttendRequest,
    JoinAnswer,
    JoinRequest,
    Leave,
    NodeInput,
    Report,
    Reported,
    RunningShard,
    ShardChange,
    ShardHealth,
    ShardRef,
)
from agent.load_report import LoadReport
from agent.loads import Loads
from agent.membership import Membership
from agent.outbox import Outbox
from agent.probe import Probe
from fleet.facts import Load
from fleet.reasons import Failure, Reason
from tests.fake_engines.node import FakeNode
from tests.waiting import until

SHARD = ShardRef(replica="tiny-0", generation=5)
CHANGE = ShardChange(shard=SHARD, health=ShardHealth.EXITED, failure=Failure(reason=Reason.EXITED, detail="it ended"))


@workflow.defn(name=node_contract.NODE_WORKFLOW, sandboxed=False)
class TinyNode:
    """Claims what it is told to claim, holds the lease it is told to hold."""

    @workflow.init
    def __init__(self, input: NodeInput) -> None:
        self.seen: dict[str, Any] = {"joins": [], "highest": [], "reports": [], "loads": [], "left": False}
        self.stale_reports = 0
        self.deaf_to_loads = 0
        self.failing_joins = 0
        self.lease: asyncio.Task[None] | None = None
        self.over = False

    @workflow.run
    async def run(self, input: NodeInput) -> None:
        await workflow.wait_condition(lambda: self.over)

    @workflow.update(name=node_contract.JOIN)
    async def join(self, request: JoinRequest) -> JoinAnswer:
        self.seen["joins"].append(request.incarnation)
        self.seen["highest"].append(request.highest_generation)
        if self.failing_joins:
            self.failing_joins -= 1
            raise ApplicationError("the fleet does not run")
        if self.lease is not None:
            self.lease.cancel()
        attend = AttendRequest(node=request.node, incarnation=request.incarnation)
        self.lease = asyncio.create_task(self._attend(attend))
        # As if it never knew of a lease that ended.
        first = len(self.seen["joins"]) == 1
        return JoinAnswer(claimed=tuple(shard.shard for shard in request.shards), returned=first, loads_gap_s=0.1)

    async def _attend(self, request: AttendRequest) -> None:
        await workflow.execute_activity(
            node_contract.ATTEND,
            request,
            task_queue=contract.lease_queue(request.node, request.incarnation),
            start_to_close_timeout=timedelta(hours=1),
            heartbeat_timeout=timedelta(seconds=1),
            cancellation_type=ActivityCancellationType.TRY_CANCEL,
        )

    @workflow.update(name=node_contract.REPORT)
    async def report(self, report: Report) -> Reported:
        if report.loads:
            self.seen["loads"].append([(load.replica, load.in_flight) for load in report.loads])
            await workflow.wait_condition(lambda: not self.deaf_to_loads)
            return Reported()
        if self.stale_reports:
            self.stale_reports -= 1
            raise ApplicationError("join again", type=node_contract.STALE_INCARNATION)
        self.seen["reports"].append([change.failure.detail for change in report.changes])
        return Reported()

    @workflow.update(name=node_contract.LEAVE)
    def leave(self, leave: Leave) -> Reported:
        self.seen["left"] = True
        return Reported()

    @workflow.signal
    def set(self, name: str, value: int) -> None:
        setattr(self, name, value)

    @workflow.signal
    def close_lease(self) -> None:
        if self.lease is not None:
            self.lease.cancel()

    @workflow.query
    def what(self) -> dict[str, Any]:
        return self.seen


@dataclass
class Member:
    """An agent's membership that runs, and the workflow it speaks to."""

    client: Client
    node: FakeNode
    membership: Membership
    outbox: Outbox
    handle: WorkflowHandle[Any, Any]
    task: "asyncio.Task[None]"
    running: list[RunningShard] = field(default_factory=list)
    adopted: list[tuple[ShardRef, ...]] = field(default_factory=list)
    returned: list[bool] = field(default_factory=list)
    """What each of these was told: whether the agent came back."""
    taken: list[ShardChange] = field(default_factory=list)

    async def seen(self, what: str) -> Any:
        return (await self.handle.query(TinyNode.what))[what]

    async def times(self, what: str, count: int) -> bool:
        return len(await self.seen(what)) >= count


@asynccontextmanager
async def member(client: Client, node: FakeNode, *, loads: Loads | None = None, **first: int) -> AsyncIterator[Member]:
    await client.start_workflow(
        node_contract.NODE_WORKFLOW, NodeInput(node="n1"), id=contract.node_id("n1"), task_queue=contract.CONTROL_QUEUE
    )
    handle = client.get_workflow_handle(contract.node_id("n1"))  # of whichever run there is
    for name, value in first.items():
        await handle.signal(TinyNode.set, args=[name, value])
    outbox = Outbox(loads)
    made: Member

    async def adopt(shards: tuple[RunningShard, ...], answer: JoinAnswer) -> None:
        made.adopted.append(answer.claimed)
        made.returned.append(answer.returned)

    membership = Membership(
        node.config,
        "abc",
        outbox,
        ledger=node.ledger,
        measure=node.measure,
        running=lambda: tuple(made.running),
        adopt=adopt,
        reported=lambda change: made.taken.append(change),
    )
    control = Worker(
        client,
        task_queue=contract.CONTROL_QUEUE,
        workflows=[TinyNode],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_concurrent_activities=1,
    )
    lease = Worker(client, task_queue=contract.lease_queue("n1", "abc"), activities=[membership.attend])
    async with control, lease:
        task = asyncio.create_task(membership.run(client))
        made = Member(client, node, membership, outbox, handle, task)
        try:
            yield made
        finally:
            task.cancel()
            await asyncio.wait([task])
            await handle.terminate("the test is over")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        yield FakeNode(tmp_path, probe)


async def test_a_join_tells_what_runs_and_a_report_is_taken_once(client: Client, node: FakeNode) -> None:
    async with member(client, node) as one:
        one.running.append(RunningShard(shard=SHARD, pid=1, endpoint="http://x", ready=True))
        await until(lambda: one.adopted)
        assert one.adopted == [(SHARD,)]
        one.outbox.put(CHANGE)
        await until(lambda: one.taken)
        assert await one.seen("reports") == [["it ended"]]
        assert (one.taken, one.outbox.pending()) == ([CHANGE], ())
        await one.membership.leave(client)
        assert await one.seen("left") is True


async def test_an_agent_whose_report_is_refused_as_stale_joins_again_and_reports_again(
    client: Client, node: FakeNode
) -> None:
    async with member(client, node, stale_reports=2) as one:
        one.outbox.put(CHANGE)
        await until(lambda: one.taken, 20)
        assert await one.seen("joins") == ["abc"] * 3
        assert await one.seen("reports") == [["it ended"]]


async def test_a_join_that_fails_is_tried_again(client: Client, node: FakeNode) -> None:
    async with member(client, node, failing_joins=2) as one:
        await until(lambda: one.adopted, 20)
        assert await one.seen("joins") == ["abc"] * 3


async def test_an_agent_whose_lease_is_closed_joins_again(client: Client, node: FakeNode) -> None:
    async with member(client, node) as one:
        await until(lambda: one.membership.attending)
        await one.handle.signal(TinyNode.close_lease)
        await until(partial(one.times, "joins", 2), 20)
        await until(lambda: one.membership.attending)
        assert one.returned == [True, True], "its own lease ended: it comes back, whatever the workflow knew"


async def test_a_lease_that_a_later_join_replaced_is_not_missed(client: Client, node: FakeNode) -> None:
    async with member(client, node) as one:
        await until(lambda: one.membership.attending)
        one.membership.rejoin()
        await until(partial(one.times, "joins", 2))
        await until(lambda: one.membership.attending == 2)
        await until(lambda: one.membership.attending == 1, 20)  # the first one hears of its end by its heartbeat
        assert await one.seen("joins") == ["abc"] * 2
        assert one.returned == [True, False], "it was a member all the time"


async def test_a_node_whose_workflow_is_gone_starts_it_again(client: Client, node: FakeNode) -> None:
    async with member(client, node) as one:
        await until(lambda: one.membership.attending)
        await one.handle.terminate("somebody did it")
        one.outbox.put(CHANGE)
        await until(lambda: one.taken, 20)
        assert await one.seen("joins") == ["abc"]
        assert await one.seen("reports") == [["it ended"]]


async def test_a_join_tells_how_far_this_node_has_counted(client: Client, node: FakeNode) -> None:
    node.ledger.note_start(SHARD)
    async with member(client, node) as one:
        await until(lambda: one.membership.attending)
        assert await one.seen("highest") == [5]


def working(in_flight: int, replica: str = "tiny-0") -> Load:
    return Load(replica=replica, generation=5, in_flight=in_flight)


# As the fleet's answer to the join says, reports of loads follow each other sooner than the hour they began with.


async def test_loads_are_told_and_what_ran_before_is_told_even_when_it_is_idle(client: Client, node: FakeNode) -> None:
    async with member(client, node, loads=Loads(gap_s=3600)) as one:
        one.running.append(RunningShard(shard=SHARD, pid=1, endpoint="http://x", ready=True))
        await until(lambda: one.adopted)
        for load in (working(0), working(0, "new-0")):
            one.outbox.loads.read(load)
        one.outbox.filled.set()
        await until(partial(one.times, "loads", 1))
        one.outbox.loads.read(working(2))
        await until(lambda: one.outbox.loads.due(time.monotonic()))
        one.outbox.filled.set()
        await until(partial(one.times, "loads", 2))
        assert await one.seen("loads") == [[["tiny-0", 0]], [["tiny-0", 2]]]
        assert one.outbox.loads.due(time.monotonic() + 1) == ()


async def test_an_exit_does_not_wait_for_a_report_of_loads_that_nobody_answers(client: Client, node: FakeNode) -> None:
    async with member(client, node, loads=Loads(gap_s=3600), deaf_to_loads=1) as one:
        await until(lambda: one.adopted)
        one.outbox.loads.read(working(3))
        one.outbox.filled.set()
        await until(partial(one.times, "loads", 1))
        one.outbox.put(CHANGE)
        await until(lambda: one.taken)
        await until(lambda: one.outbox.loads.due(time.monotonic()))
        one.outbox.filled.set()
        assert await one.seen("loads") == [[["tiny-0", 3]]], "one is under way, so no second one is sent"


async def test_while_a_report_of_loads_is_under_way_no_other_is_sent_and_then_the_newest(
    client: Client, node: FakeNode
) -> None:
    async with member(client, node, loads=Loads(gap_s=3600), deaf_to_loads=1) as one:
        await until(lambda: one.adopted)
        one.outbox.loads.read(working(3))

        async def told(count: int) -> bool:
            one.outbox.filled.set()
            return await one.times("loads", count)

        await until(partial(told, 1))
        one.outbox.loads.read(working(7))
        await one.handle.signal(TinyNode.set, args=["deaf_to_loads", 0])
        await until(partial(told, 2), 20)
        assert await one.seen("loads") == [[["tiny-0", 3]], [["tiny-0", 7]]]


class CountedLoads(Loads):
    """Knows how often a report was tried."""

    tries = 0

    def tried(self, now: float) -> None:
        super().tried(now)
        self.tries += 1


async def test_loads_without_an_answer_are_dropped_and_never_more_than_one_update_is_left_behind(
    client: Client, node: FakeNode
) -> None:
    async with member(client, node, deaf_to_loads=1) as one:
        await until(lambda: one.adopted)
        loads = CountedLoads(gap_s=0)
        report = LoadReport("n1", "abc", loads, timeout_s=0.3)

        async def told(count: int) -> bool:
            report.begin(client)
            return await one.times("loads", count)

        try:
            loads.read(working(3))
            await until(partial(told, 1))
            loads.read(working(7))

            def tries(count: int) -> bool:
                report.begin(client)
                return loads.tries >= count

            await until(partial(tries, 3), 20)
            assert await one.seen("loads") == [[["tiny-0", 3]]], "the same update was asked for again"
            await one.handle.signal(TinyNode.set, args=["deaf_to_loads", 0])
            await until(partial(told, 2), 20)
            assert (await one.seen("loads"))[1] == [["tiny-0", 7]]
            await until(lambda: loads.due(time.monotonic()) == ())
        finally:
            await report.close()


def test_an_outbox_keeps_what_changed_meanwhile() -> None:
    outbox = Outbox()
    outbox.put(CHANGE)
    sent = outbox.pending()
    newer = CHANGE.model_copy(update={"failure": Failure(reason=Reason.EXITED, detail="again")})
    outbox.put(newer)
    outbox.taken(sent)
    assert outbox.pending() == (newer,)
    outbox.taken((newer,))
    assert outbox.pending() == ()

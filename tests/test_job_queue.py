"""Jobs on one model run in their order: the queue as values, then with real workflows."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import TerminatedError

from activities import contract
from activities.contract import JobState, StepState
from activities.node_contract import StartShard
from activities.rounds import Rounds
from fleet.job_queue import Queues, Turn, Waiting, enter, leave, turns
from fleet.reasons import Reason
from fleet.spec import JobKind
from fleet.state import Policy
from tests.control import Cell, control_plane
from tests.fleets import GIB
from tests.test_workflows import failure_of
from tests.waiting import until
from workflows.calls import TASK_TIMEOUT

SERVE: dict[str, Any] = {"repo": "file:/models/tiny.gguf", "name": "tiny"}


def line(*jobs: str) -> Queues:
    queues: Queues = {}
    for job in jobs:
        kind, _, name = job.partition(":")
        queues = enter(queues, "m", name, JobKind(kind))
    return queues


# -- values -----------------------------------------------------------------------------------------------------------


def test_each_waits_for_the_one_just_ahead() -> None:
    assert turns(line("serve:a", "serve:b", "update:c"), ()) == {
        "a": Turn(granted=True, behind=Waiting(job="b")),
        "b": Turn(granted=False, waiting="a on the same model"),
        "c": Turn(granted=False, waiting="b on the same model"),
    }


def test_a_remove_behind_is_told_before_the_next() -> None:
    told = turns(line("serve:a", "serve:b", "remove:c"), ())["a"]
    assert told.behind == Waiting(job="c", kind=JobKind.REMOVE)


def test_nobody_but_a_remove_has_a_turn_while_the_model_goes() -> None:
    assert turns(line("serve:a"), {"m"}) == {
        "a": Turn(granted=False, waiting="the model's removal, which is under way")
    }
    assert turns(line("remove:a"), {"m"})["a"].granted


def test_whoever_asks_twice_keeps_the_place_and_whoever_leaves_frees_it() -> None:
    queues = line("serve:a", "serve:b", "serve:a", "serve:c")
    assert [one.job for one in queues["m"]] == ["a", "b", "c"]
    assert turns(leave(queues, "b"), ())["c"].waiting == "a on the same model"
    assert leave(leave(leave(queues, "a"), "b"), "c") == {}
    assert leave(queues, "stranger") is queues


# -- real workflows ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client) as made:
        yield made


class Gate:
    """Starts of shards wait here until it opens."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, request: StartShard) -> None:
        self.reached.set()
        await self.open.wait()


async def waits(cell: Cell, job: WorkflowHandle[Any, Any], for_: WorkflowHandle[Any, Any]) -> None:
    async def said() -> bool:
        row = (await cell.status(job)).steps[0]
        return (row.state, row.detail) == (StepState.RUNNING, f"waits for {for_.id} on the same model")

    await until(said, 20.0)


async def test_jobs_on_one_model_run_in_order_and_on_others_beside_them(cell: Cell) -> None:
    gate = Gate()
    async with cell.node("n1", start=gate) as node:
        await node.join()
        first = await cell.start(SERVE)
        await gate.reached.wait()
        second = await cell.start({**SERVE, "replicas": 2})
        await waits(cell, second, first)
        third = await cell.start({**SERVE, "context_length": 4096})
        await waits(cell, third, second)
        other = await cell.run({"kind": "mirror", "repo": "file:/models/other.gguf", "name": "other"})
        assert other.sentence.startswith("other: copied")
        gate.open.set()
        results = [await job.result() for job in (first, second, third)]
        assert [result.replicas for result in results] == [("tiny-0",), ("tiny-0", "tiny-1"), ("tiny-2",)]
        ended = [(await cell.status(job)).steps[-1].ended_at for job in (first, second)]
        begun = [(await cell.status(job)).steps[1].started_at for job in (second, third)]
        assert ended[0] <= begun[0]
        assert ended[1] <= begun[1]
        snapshot: contract.Snapshot = await cell.fleet.query(contract.QUERY_SNAPSHOT, result_type=contract.Snapshot)
        assert snapshot.queues == {}


async def test_a_cancelled_job_leaves_its_place(cell: Cell) -> None:
    gate = Gate()
    async with cell.node("n1", start=gate) as node:
        await node.join()
        first = await cell.start(SERVE)
        await gate.reached.wait()
        second, third = await cell.start(SERVE), None
        await waits(cell, second, first)
        third = await cell.start(SERVE)
        await waits(cell, third, second)
        await second.cancel()
        await waits(cell, third, first)
        assert (await cell.status(second)).state is JobState.CANCELLED
        gate.open.set()
        assert (await third.result()).sentence.endswith("as before: nothing was to be changed")


async def test_a_terminated_job_holds_nobody_up(cell: Cell) -> None:
    gate = Gate()
    async with cell.node("n1", start=gate) as node:
        await node.join()
        first = await cell.start(SERVE)
        await gate.reached.wait()
        second = await cell.start(SERVE)
        await waits(cell, second, first)
        await first.terminate("by hand")
        with pytest.raises(Exception) as caught:
            await first.result()
        assert isinstance(caught.value.__cause__, TerminatedError)
        gate.open.set()
        rounds = Rounds(cell.client, cell.name, Policy(), TASK_TIMEOUT)

        async def seen() -> bool:  # by a round, or by Fleet itself when it has news for the job
            return bool(await rounds.find_ended_jobs()) or (await cell.status(second)).state is not JobState.RUNNING

        await until(seen, 20.0)
        assert (await second.result()).replicas == ("tiny-0",)


async def test_a_remove_need_not_wait_for_a_job_that_waits_for_room(cell: Cell) -> None:
    async with cell.node("n1", memory=GIB // 2) as node:
        await node.join()
        first = await cell.start({**SERVE, "room_deadline_s": None})
        await until(lambda: _placing(cell, first), 20.0)
        removed = await cell.run({"kind": "remove", "name": "tiny"})
        assert removed.sentence.startswith("tiny is removed")
        failure = await failure_of(first)
        assert failure.type == Reason.SUPERSEDED
        assert (await cell.state()).models == {}


async def test_a_later_wish_takes_the_place_of_one_that_has_no_room(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        first = await cell.start({**SERVE, "memory": "1TiB", "room_deadline_s": None})
        await until(lambda: _placing(cell, first), 20.0)
        second = await cell.run(SERVE)
        assert second.replicas == ("tiny-0",)
        assert (await failure_of(first)).type == Reason.SUPERSEDED


async def _placing(cell: Cell, job: WorkflowHandle[Any, Any]) -> bool:
    return "nodes fit" in (await cell.status(job)).steps[4].detail

"""The kinds of jobs: what an update keeps, what a remove deletes, when a job gives up, what a cancel brings back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from activities import contract
from activities.contract import JobState, StepState
from activities.node_contract import StartShard
from fleet.inputs import read_request, updated
from fleet.reasons import LlmgwError, Reason
from fleet.room_deadline import FIRST_LOOK_S, GIVE_WAY_S, NEXT_LOOK_S, RoomDeadline
from fleet.spec import JobKind, JobRequest, Rollout, Scaling
from fleet.standing import no_room
from fleet.state import ReplicaState
from fleet.wishes import abandon, apply, settle
from tests.control import Cell, control_plane
from tests.fleets import GIB, fleet, inventory, spec
from tests.test_planning import after, serving
from tests.test_workflows import failure_of
from tests.waiting import until

SERVE: dict[str, Any] = {"repo": "file:/models/tiny.gguf", "name": "tiny"}


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client) as made:
        yield made


# -- values -----------------------------------------------------------------------------------------------------------

KNOWN = JobRequest.model_validate(
    {**SERVE, "replicas": 3, "context_length": 4096, "scaling": {"min": 1, "max": 4}, "args": ["a=1"]}
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"repo": "org/name@v2"}, {"repo": "org/name@v2"}),
        ({"context_length": None}, {"context_length": None}),
        ({"scaling": {"max": 8}}, {"scaling": Scaling(min=1, max=8)}),
        ({"scaling": {"min": 2}}, {"scaling": Scaling(min=2, max=4)}),
        ({"scaling": None}, {"scaling": None}),
        ({"rollout": {"recreate": True}}, {"rollout": Rollout(recreate=True)}),
        ({"args": []}, {"args": ()}),
        ({"room_deadline_s": None}, {"room_deadline_s": None}),
    ],
)
def test_an_update_keeps_what_is_left_out(given: dict[str, Any], expected: dict[str, Any]) -> None:
    update = read_request({"kind": "update", "name": "tiny", "cell": "blue", **given})
    assert updated(KNOWN, update) == KNOWN.model_copy(update={"kind": JobKind.UPDATE, "cell": "blue", **expected})


def test_an_update_that_makes_no_sense_with_what_is_known_is_refused() -> None:
    with pytest.raises(LlmgwError, match="min 5 is more than max 4"):
        updated(KNOWN, read_request({"kind": "update", "name": "tiny", "scaling": {"min": 5}}))


def test_the_clock_for_room_runs_only_while_it_waits() -> None:
    clock = RoomDeadline(60.0)
    clock.waits(True, 100.0)
    clock.waits(True, 130.0)
    assert clock.left_s(130.0, rival=False) == 30.0
    assert clock.left_s(110.0, rival=True) == GIVE_WAY_S - 10.0
    assert not clock.expired(159.0)
    assert clock.expired(160.0)
    clock.waits(False, 131.0)
    assert clock.left_s(131.0, rival=True) is None
    clock.waits(True, 200.0)
    assert clock.left_s(200.0, rival=False) == 60.0
    clock.looked(260.0)
    assert clock.left_s(260.0, rival=False) == NEXT_LOOK_S
    at_once = RoomDeadline(0.0)
    at_once.waits(True, 10.0)
    assert at_once.left_s(10.0, rival=True) == FIRST_LOOK_S
    for_ever = RoomDeadline(None)
    for_ever.waits(True, 10.0)
    assert (for_ever.left_s(10.0, rival=False), for_ever.left_s(10.0, rival=True)) == (None, GIVE_WAY_S)


def test_no_room_is_a_reason_and_none_while_room_is_made() -> None:
    state = after(fleet({"n1": inventory(memory=GIB)}, spec("big", memory=2 * GIB)))
    failure = no_room(state, state.models["big"])
    assert failure is not None
    assert (failure.reason, failure.detail) == (Reason.MEMORY, state.models["big"].waiting)
    nobody = after(fleet({}, spec("m")))
    alone = no_room(nobody, nobody.models["m"])
    assert alone is not None
    assert alone.reason is Reason.NO_NODES
    served = serving(after(fleet({"n1": inventory(memory=GIB)}, spec("m"))))
    assert no_room(served, served.models["m"]) is None
    both, _ = apply(served, spec("late"), 20.0)
    both = after(both, 21.0)
    assert no_room(both, both.models["late"]) is not None
    leaving = both.replicas["m-0"].model_copy(update={"state": ReplicaState.DRAINING})
    assert no_room(both.with_replica(leaving), both.models["late"]) is None


def test_a_change_taken_back_leaves_what_serves_as_it_was() -> None:
    old = spec("m", replicas=2)
    state = serving(after(fleet({"n1": inventory()}, old)))
    changed, applied = apply(state, spec("m", replicas=2, context=4096), 20.0, job="j")
    assert applied.restarts
    changed = after(changed, 21.0)
    back = abandon(changed, "m", "j")
    assert back.models["m"].spec == old
    assert back.models["m"].spec_version == 3
    assert {r.id: r.spec_version for r in back.replicas.values()} == {"m-0": 3, "m-1": 3, "m-2": 2}
    assert abandon(changed, "m", "other") is changed
    whole = serving(changed, 22.0)
    whole = serving(after(whole, 23.0), 24.0)
    for key in ("m-2", "m-3"):
        assert whole.replicas[key].state is ReplicaState.SERVING
    kept = abandon(whole, "m", "j")
    assert (kept.models["m"].spec_version, kept.models["m"].previous) == (2, None)
    assert abandon(settle(changed, "m", "j"), "m", "j").models["m"].spec_version == 2


# -- real workflows ---------------------------------------------------------------------------------------------------


async def test_update(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        unknown = await failure_of(await cell.start({"kind": "update", "name": "tiny"}))
        assert unknown.message.startswith("no model is named tiny; there are: none")
        await cell.run({**SERVE, "replicas": 2, "priority": 70})
        job = await cell.start({"kind": "update", "name": "tiny", "context_length": 4096})
        result = await job.result()
        assert result.sentence == f"tiny is serving: 2 replicas on {node.name}"
        assert (await cell.status(job)).steps[3].detail == "tiny changed: version 2 replaces what serves"
        model = (await cell.state()).models["tiny"]
        assert (model.spec.replicas, model.spec.priority, model.spec.context_length) == (2, 70, 4096)
        again = await cell.start({"kind": "update", "name": "tiny"})
        assert (await again.result()).sentence.endswith("as before: nothing was to be changed")
        await cell.run({**SERVE, "replicas": 2, "priority": 70, "context_length": 4096})
        assert (await cell.state()).models["tiny"].spec_version == 2


async def test_a_remove_deletes_the_weights_where_it_is_asked_to(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        await cell.run({**SERVE, "name": "twin"})
        first = await cell.start({"kind": "remove", "name": "twin", "delete_weights": True})
        assert (await first.result()).sentence.endswith("the weights stay in the mirror: tiny uses them too")
        job = await cell.start({"kind": "remove", "name": "tiny", "delete_weights": True})
        assert (await job.result()).sentence.endswith("; 1 GiB are deleted from the mirror")
        assert cell.answers.calls.count(contract.DISCARD_WEIGHTS) == 1
        assert [row.state for row in (await cell.status(job)).steps] == [
            "skipped", "done", "skipped", "done", "done", "skipped",
        ]  # fmt: skip


async def test_a_job_without_room_gives_up_and_leaves_nothing(cell: Cell) -> None:
    async with cell.node("n1", memory=GIB // 2) as node:
        await node.join()
        job = await cell.start({**SERVE, "room_deadline_s": 0})
        failure = await failure_of(job)
        assert failure.type == Reason.MEMORY
        assert failure.message.startswith(
            f"0/1 nodes fit tiny: 1 memory (need 1 GiB, best free 512 MiB on {node.name}); no room came within"
        )
        status = await cell.status(job)
        assert (status.steps[4].state, status.state) == (StepState.FAILED, JobState.FAILED)
        state = await cell.state()
        assert (state.models, state.replicas) == ({}, {})


async def test_a_cancelled_update_leaves_the_model_as_it_was(cell: Cell) -> None:
    starting = asyncio.Event()

    async def first_only(request: StartShard) -> None:
        if request.context_length != 2048:
            starting.set()
            await asyncio.Event().wait()

    async with cell.node("n1", start=first_only) as node:
        await node.join()
        await cell.run(SERVE)
        job = await cell.start({"kind": "update", "name": "tiny", "context_length": 4096})
        await starting.wait()
        await job.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await job.result()
        assert isinstance(caught.value.cause, CancelledError)

        async def as_before() -> bool:
            state = await cell.state()
            return [(r.id, r.state) for r in state.replicas.values()] == [("tiny-0", ReplicaState.SERVING)]

        await until(as_before, 30.0)
        model = (await cell.state()).models["tiny"]
        assert model.spec.context_length == 2048
        assert len(node.started) == 2
        assert (await cell.run(SERVE)).sentence.endswith("as before: nothing was to be changed")

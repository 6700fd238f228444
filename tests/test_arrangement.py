"""Small fleets: another order is taken where more fits then, and only then; it is told, and nobody goes for it."""

import pytest

from fleet.arrangement import TIGHT, Want, arranged
from fleet.commits import commit
from fleet.placement import Standings
from fleet.planning import plan
from fleet.room import room_of
from fleet.spec import ModelSpec
from fleet.state import FleetState, ReplicaState
from fleet.steps import StepKind
from fleet.wishes import apply
from tests.fleets import GIB, fleet, inventory, spec
from tests.test_planning import after, serving, text

PAIR = {"n1": inventory(memory=10 * GIB), "n2": inventory(memory=10 * GIB)}


def of(name: str, memory: int, replicas: int = 1, priority: int = 50) -> ModelSpec:
    return spec(name, memory=memory * GIB, replicas=replicas, priority=priority)


def placed(state: FleetState) -> list[str]:
    return sorted(replica.id for replica in state.replicas.values())


def test_the_copies_of_a_model_are_spread_where_everything_fits() -> None:
    state = after(fleet(PAIR, of("a", 4, 2), of("b", 6, 2)))
    assert placed(state) == ["a-0", "a-1", "b-0", "b-1"]
    assert {replica.nodes for replica in state.replicas.values() if replica.model == "a"} == {("n1",), ("n2",)}


def test_what_spreading_would_leave_out_is_packed_in_and_said() -> None:
    nodes = {**PAIR, "n3": inventory(memory=3 * GIB)}
    state = fleet(nodes, of("a", 5, 2), of("b", 3), of("c", 2, 4))
    decided = plan(state, 10.0)
    assert all(step.places for step in decided.steps)
    assert len(decided.steps) == 7
    full = fleet(PAIR, of("a", 5, 2), of("b", 3, 3))
    lines = text(plan(full, 10.0))
    assert "scale up a-1: wanted 2, there are 1 → a goes to n1 (best of 2 that fit), packed so that more fits" in lines
    assert placed(after(full)) == ["a-0", "a-1", "b-0", "b-1", "b-2"]


def test_a_plan_that_was_arranged_is_quiet_afterwards_and_says_what_waits() -> None:
    state = fleet(PAIR, of("a", 5, 2), of("b", 3, 4))
    decided = plan(state, 10.0)
    assert decided == plan(state, 10.0)
    state = commit(state, decided, 10.0)
    assert placed(state) == ["a-0", "a-1", "b-0", "b-1", "b-2"]
    assert state.models["b"].waiting == "0/2 nodes fit b: 2 memory (need 3 GiB, best free 1 GiB on n2)"
    assert plan(state, 11.0).quiet


def test_what_is_more_important_is_never_left_out_for_more_of_what_is_less() -> None:
    state = after(fleet({"n1": inventory(memory=10 * GIB)}, of("dear", 4, 1, 90), of("a", 5, 2), of("b", 6)))
    assert "dear-0" in placed(state)
    assert placed(state) == ["b-0", "dear-0"]


def test_where_room_can_be_made_nothing_is_put_in_the_way_of_it() -> None:
    state = serving(after(fleet(PAIR, of("low", 4, 2, 1))))
    state, _ = apply(state, of("a", 5, 2), 20.0)
    state, _ = apply(state, of("b", 7), 20.0)
    decided = plan(state, 21.0)
    assert decided.steps[0].kind is StepKind.PREEMPT
    assert all(state.replicas[step.replica].model == "low" for step in decided.steps if step.kind is StepKind.PREEMPT)


def test_what_serves_is_never_moved() -> None:
    state = serving(after(fleet(PAIR, of("a", 5, 2))))
    before = {replica.id: replica.nodes for replica in state.replicas.values()}
    state, _ = apply(state, of("b", 7), 20.0)
    state, _ = apply(state, of("c", 2, 2), 20.0)
    state = after(state, 21.0)
    assert {key: state.replicas[key].nodes for key in before} == before
    assert all(state.replicas[key].state is ReplicaState.SERVING for key in before)


@pytest.mark.parametrize(("replicas", "found"), [(3, True), (2, False)])
def test_the_room_is_left_as_it_was(replicas: int, found: bool) -> None:
    state = fleet(PAIR, of("a", 5, 2), of("b", 3, replicas))
    room = room_of(state)
    wants = [
        Want(StepKind.SCALE_UP, model, f"{name}-{number}", "wanted")
        for name, model in state.models.items()
        for number in range(model.spec.replicas)
    ]
    better = arranged(room, Standings(room.nodes), wants)
    assert (better is not None) is found
    assert better is None or (better.weights is TIGHT and better.complete)
    assert room.moment == 0

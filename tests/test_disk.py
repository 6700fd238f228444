"""Disk for weights is promised once: between placements of a pass, and until a node reports what it fetched."""

from fleet.commits import commit
from fleet.explain import explain
from fleet.facts import node_measured
from fleet.forecast import passes
from fleet.plan_text import plan_lines
from fleet.planning import plan
from fleet.reasons import Reason
from fleet.room import room_of
from fleet.standing import over_capacity, oversold
from fleet.state import FleetState, ReplicaState
from fleet.wishes import apply
from tests.fleets import GIB, fleet, inventory, spec
from tests.test_planning import after, failed, serving, text


def measured(state: FleetState, free: int, *weights: str) -> FleetState:
    """n1 says what it holds and what is free."""
    found = state.nodes["n1"].inventory.model_copy(update={"disk_free": free, "weights": weights})
    return node_measured(state, "n1", "i1", found)


def test_two_models_of_one_pass_do_not_get_the_same_disk() -> None:
    state = fleet({"n1": inventory(disk=4 * GIB)}, spec("a", disk=3 * GIB), spec("b", disk=3 * GIB))
    decided = plan(state, 10.0)
    assert text(decided) == [
        "scale up a-0: wanted 1, there are 0 → a goes to n1",
        "scale up b-0: wanted 1, there are 0 → 0/1 nodes fit b: 1 disk (need 3 GiB, best free 1 GiB on n1)",
    ]
    assert over_capacity(commit(state, decided, 10.0)) == {}


def test_disk_is_kept_until_the_node_holds_the_weights_and_its_own_measure_counts_from_then_on() -> None:
    state = serving(after(fleet({"n1": inventory(disk=4 * GIB)}, spec("a", disk=3 * GIB))))
    state, _ = apply(state, spec("b", disk=2 * GIB), 20.0)
    assert room_of(state).disk_kept("n1") == 3 * GIB
    assert not any(step.places for step in plan(state, 21.0).steps)
    fetched = measured(state, GIB, "a-3-abc")
    assert room_of(fetched).disk_kept("n1") == 0
    assert not any(step.places for step in plan(fetched, 21.0).steps)
    cleared = measured(state, 2 * GIB, "a-3-abc")
    assert [step.replica for step in plan(cleared, 21.0).steps if step.places] == ["b-0"]


def test_replicas_that_read_the_same_weights_on_one_node_keep_disk_once() -> None:
    state = after(fleet({"n1": inventory(disk=4 * GIB)}, spec("a", disk=3 * GIB, replicas=2)))
    assert [replica.nodes for replica in state.replicas.values()] == [("n1",), ("n1",)]
    assert room_of(state).disk_kept("n1") == 3 * GIB
    one = failed(state, "a-0", Reason.EXITED, 11.0)
    assert room_of(one).disk_kept("n1") == 3 * GIB
    assert room_of(failed(one, "a-1", Reason.EXITED, 12.0)).disk_kept("n1") == 0


def test_weights_that_are_there_need_no_disk() -> None:
    state = fleet({"n1": inventory(disk=0, weights=("a-3-abc",))}, spec("a", disk=3 * GIB))
    assert [step.places for step in plan(state, 10.0).steps] == [True]


def test_a_preemption_gives_back_the_disk_of_what_never_came() -> None:
    state = after(fleet({"n1": inventory(disk=4 * GIB)}, spec("low", disk=3 * GIB, priority=1)))
    state, _ = apply(state, spec("high", disk=3 * GIB, priority=90), 20.0)
    assert text(plan(state, 21.0))[0] == ("preempt low-0: high is more important (90 against 1): frees 1 GiB on n1")


def test_disk_that_is_being_freed_is_not_kept_busy_by_new_replicas_of_what_goes() -> None:
    state = serving(after(fleet({"n1": inventory(disk=4 * GIB)}, spec("low", disk=GIB, priority=1, replicas=2))))
    state, _ = apply(state, spec("high", disk=4 * GIB, priority=90), 20.0)
    for turn in range(4):
        state = after(state, 21.0 + turn)
        for replica in list(state.replicas.values()):
            if replica.state is ReplicaState.DRAINING:
                state = state.without_replica(replica.id)
    assert [replica.model for replica in state.replicas.values()] == ["high"]
    assert state.models["low"].waiting == "0/1 nodes fit low: 1 disk (need 1 GiB, best free 0 B on n1)"


def test_an_explanation_tells_what_is_on_its_way() -> None:
    state, _ = apply(
        after(fleet({"n1": inventory(disk=4 * GIB)}, spec("a", disk=3 * GIB))), spec("b", disk=3 * GIB), 20.0
    )
    [way] = explain(state, state.models["b"]).ways
    assert way.sentence == "free 2 GiB of disk on n1, which keeps 3 GiB for weights that are on their way"
    freed = measured(state, 6 * GIB)
    assert explain(freed, freed.models["b"]).now.shards


def test_a_forecast_counts_the_disk_of_what_it_starts() -> None:
    state = fleet({"n1": inventory(disk=4 * GIB)}, spec("a", disk=3 * GIB), spec("b", disk=3 * GIB))
    assert [line for one in passes(state, 10.0) for line in plan_lines(one.plan, one.state)] == [
        "scale up a-0 on n1: wanted 1, there are 0",
        "  fits 1 of 1 nodes, reserves 1 GiB",
        "scale up b-0: wanted 1, there are 0",
        "  waits: 0/1 nodes fit b: 1 disk (need 3 GiB, best free 1 GiB on n1)",
    ]


def test_what_a_node_takes_back_is_not_sold_again() -> None:
    state = after(fleet({"n1": inventory(disk=4 * GIB)}, spec("a", disk=3 * GIB)))
    shrunk = measured(state, GIB)
    assert over_capacity(shrunk) == {"n1/disk": 2 * GIB}
    more, _ = apply(shrunk, spec("b"), 20.0)
    assert oversold(more, commit(more, plan(more, 21.0), 21.0)) == ()
    assert oversold(state, shrunk) == ("n1/disk",)

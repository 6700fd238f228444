"""Plans as tables: a state in, named steps out, with their reasons and every node's verdict."""

import pytest

from fleet.commits import commit, moved
from fleet.facts import ReplicaEvent, node_joined, node_lost, replica_changed
from fleet.planning import backoff_s, next_deadline, plan
from fleet.reasons import Failure, Reason
from fleet.state import CPU, Device, FleetState, NodeState, Outcome, ReplicaState, RestartPolicy
from fleet.steps import Plan, StepKind
from fleet.wishes import apply, cordon, drain_node, remove, scale
from tests.fleets import GIB, fleet, inventory, spec


def text(decided: Plan) -> list[str]:
    """A plan as a person would read it."""
    lines = []
    for step in decided.steps:
        where = ""
        if step.decision is not None:
            where = f" → {step.decision.sentence}"
        lines.append(f"{step.kind} {step.replica}: {step.reason}{where}")
    return lines


def after(state: FleetState, now: float = 10.0) -> FleetState:
    """The state once a pass is committed."""
    return commit(state, plan(state, now), now)


def serving(state: FleetState, now: float = 11.0) -> FleetState:
    """Every placed replica serves."""
    for replica in list(state.replicas.values()):
        event = ReplicaEvent(
            replica=replica.id, generation=replica.generation, state=ReplicaState.SERVING, endpoint="http://e"
        )
        state = replica_changed(state, event, now)
    return state


def failed(state: FleetState, replica: str, reason: Reason, now: float) -> FleetState:
    record = state.replicas[replica]
    failure = Failure(reason=reason, detail="it broke", node="n1")
    event = ReplicaEvent(replica=replica, generation=record.generation, state=ReplicaState.FAILED, failure=failure)
    return replica_changed(state, event, now)


def test_a_new_model_is_placed_and_the_second_pass_is_quiet() -> None:
    state = fleet({"n1": inventory(), "n2": inventory()}, spec("m", replicas=2))
    decided = plan(state, 10.0)
    assert text(decided) == [
        "scale up m-0: wanted 2, there are 0 → m goes to n1 (best of 2 that fit)",
        "scale up m-1: wanted 2, there are 1 → m goes to n2 (best of 2 that fit)",
    ]
    placed = commit(state, decided, 10.0)
    assert [(r.id, r.nodes, r.state, r.generation) for r in placed.replicas.values()] == [
        ("m-0", ("n1",), ReplicaState.PLACED, 1),
        ("m-1", ("n2",), ReplicaState.PLACED, 2),
    ]
    assert plan(placed, 10.5).steps == ()


def test_every_node_answers_with_need_free_and_capacity() -> None:
    nodes = {
        "n1": inventory(memory=8 * GIB),
        "n2": inventory(memory=46 * GIB),
        "n3": inventory(engines=()),
        "n4": inventory(disk=0, memory=200 * GIB),
        "n5": inventory(memory=200 * GIB),
    }
    state = cordon(fleet(nodes, spec("qwen-72b", memory=80 * GIB)), "n5", True, 3.0)
    decision = plan(state, 10.0).steps[0].decision
    assert decision is not None
    assert decision.shards == ()
    assert decision.sentence == (
        "0/5 nodes fit qwen-72b: 2 memory (need 80 GiB, best free 46 GiB on n2), "
        "1 disk (need 1 GiB, best free 0 B on n4), 1 engine_missing, 1 node_cordoned"
    )
    assert [(v.node, v.outcome, v.reason, v.need, v.free, v.capacity) for v in decision.verdicts] == [
        ("n1", Outcome.REFUSED, Reason.MEMORY, 80 * GIB, 8 * GIB, 8 * GIB),
        ("n2", Outcome.REFUSED, Reason.MEMORY, 80 * GIB, 46 * GIB, 46 * GIB),
        ("n3", Outcome.EXCLUDED, Reason.ENGINE_MISSING, 0, 0, 0),
        ("n4", Outcome.REFUSED, Reason.DISK, GIB, 0, 0),
        ("n5", Outcome.EXCLUDED, Reason.NODE_CORDONED, 0, 0, 0),
    ]


def test_a_refusal_is_said_once_and_again_when_it_changes() -> None:
    state = fleet({"n1": inventory(memory=GIB)}, spec("big", memory=2 * GIB))
    refused = after(state)
    assert refused.models["big"].waiting.startswith("0/1 nodes fit big: 1 memory")
    assert plan(refused, 11.0).steps == ()
    grown = node_joined(refused, "n2", "i", inventory(memory=GIB // 2), 12.0)
    assert len(plan(grown, 13.0).steps) == 1
    roomy = node_joined(refused, "n2", "i", inventory(), 12.0)
    assert text(plan(roomy, 13.0)) == ["scale up big-0: wanted 1, there are 0 → big goes to n2"]


def test_what_wants_no_room_any_more_waits_for_none() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    drained = after(drain_node(state, "n1", 60.0, 12.0), 12.0)
    assert drained.models["m"].waiting == "0/1 nodes fit m: 1 node_draining"
    decided = plan(cordon(drained, "n1", False, 13.0), 13.0)
    assert (decided.steps, decided.waits_over, decided.quiet) == ((), ("m",), False)
    back = commit(cordon(drained, "n1", False, 13.0), decided, 13.0)
    assert back.models["m"].waiting == ""
    assert plan(back, 13.5).quiet


def test_what_is_given_up_does_not_say_that_it_waits_for_room() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    drained = after(drain_node(state, "n1", 60.0, 12.0), 12.0)
    ended = after(failed(drained, "m-0", Reason.STOPPED_BY_HAND, 13.0), 13.0)
    assert ended.models["m"].waiting == ""


def test_no_node_at_all_is_a_sentence() -> None:
    decided = plan(fleet({}, spec("m")), 10.0)
    assert text(decided) == ["scale up m-0: wanted 1, there are 0 → 0/0 nodes fit m: no node has joined the fleet"]


def test_gpus_are_chosen_by_free_memory_and_counted() -> None:
    nodes = {"n1": inventory(gpus=(24 * GIB, 80 * GIB, 80 * GIB))}
    decision = plan(fleet(nodes, spec("m", memory=40 * GIB, gpus=2)), 10.0).steps[0].decision
    assert decision is not None
    assert [share.uuid for share in decision.shards[0].devices] == ["GPU-1", "GPU-2"]
    refused = plan(fleet(nodes, spec("m", memory=40 * GIB, gpus=3)), 10.0).steps[0].decision
    assert refused is not None
    assert refused.sentence == "0/1 nodes fit m: 1 gpu_memory (need 40 GiB, best free 24 GiB on n1)"
    missing = plan(fleet(nodes, spec("m", memory=GIB, gpus=4)), 10.0).steps[0].decision
    assert missing is not None
    assert missing.sentence == "0/1 nodes fit m: 1 gpu_count (need 4, best free 3 on n1)"


def test_memory_that_others_hold_is_not_free() -> None:
    device = Device(uuid=CPU, total=16 * GIB, foreign=15 * GIB)
    decided = plan(fleet({"n1": inventory(devices=(device,))}, spec("m", memory=2 * GIB)), 10.0)
    assert "need 2 GiB, best free 1 GiB on n1" in text(decided)[0]


def test_weights_that_are_there_draw_a_model_and_the_score_says_so() -> None:
    nodes = {"n1": inventory(), "n2": inventory(weights=("m-abc",), disk_free=0)}
    decision = plan(fleet(nodes, spec("m")), 10.0).steps[0].decision
    assert decision is not None
    assert decision.shards[0].node == "n2"
    parts = {verdict.node: verdict.parts["weights_local"] for verdict in decision.verdicts}
    assert parts == {"n1": 0.0, "n2": 1.0}


def test_priorities_are_placed_first() -> None:
    state = fleet({"n1": inventory(memory=GIB)}, spec("low", priority=1), spec("high", priority=99))
    assert text(plan(state, 10.0))[0].startswith("scale up high-0")
    assert after(state).replicas.keys() == {"high-0"}


def test_remove_drains_then_stops_then_forgets() -> None:
    state = remove(serving(after(fleet({"n1": inventory()}, spec("m")))), "m")
    assert text(plan(state, 20.0)) == ["drain m-0: m is removed"]
    state = after(state, 20.0)
    assert plan(state, 20.5).steps == ()
    state = replica_changed(state, ReplicaEvent(replica="m-0", generation=1, state=ReplicaState.DRAINED), 21.0)
    assert text(plan(state, 22.0)) == ["stop replica m-0: it is drained"]
    state = after(state, 22.0)
    state = replica_changed(state, ReplicaEvent(replica="m-0", generation=1, state=None), 23.0)
    assert state.models == {}
    assert state.replicas == {}


def test_remove_while_starting_stops_at_once() -> None:
    state = remove(after(fleet({"n1": inventory()}, spec("m"))), "m")
    assert text(plan(state, 20.0)) == ["stop replica m-0: m is removed"]


def test_scale_down_drains_the_youngest_that_serves_last() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m", replicas=2))))
    state = after(scale(state, "m", 3), 12.0)
    state = scale(state, "m", 1)
    assert text(plan(state, 20.0)) == [
        "scale down m-2: wanted 1: 1 of 3 stay",
        "scale down m-0: wanted 1: 1 of 3 stay",
    ]


def test_a_failure_is_tried_again_after_its_backoff_with_a_new_generation() -> None:
    state = failed(serving(after(fleet({"n1": inventory()}, spec("m")))), "m-0", Reason.EXITED, 20.0)
    assert state.replicas["m-0"].shards == ()
    assert plan(state, 20.5).steps == ()
    due = next_deadline(state, 20.0)
    assert due is not None
    assert 21.0 <= due <= 21.25
    decided = plan(state, due)
    assert text(decided) == ["restart m-0: exited: it broke (on n1) → m goes to n1"]
    assert commit(state, decided, due).replicas["m-0"].generation == 2
    assert next_deadline(state, due) is None


def test_a_failure_that_cannot_be_helped_is_given_up_at_once() -> None:
    state = failed(after(fleet({"n1": inventory()}, spec("m"))), "m-0", Reason.WEIGHTS_UNREADABLE, 20.0)
    assert state.replicas["m-0"].given_up
    assert next_deadline(state, 0.0) is None
    assert plan(state, 1e9).steps == ()


def test_too_many_failures_in_the_window_are_given_up_and_a_retry_clears_it() -> None:
    state, now = after(fleet({"n1": inventory()}, spec("m"))), 20.0
    for count in range(1, 6):
        state = failed(state, "m-0", Reason.EXITED, now)
        assert state.replicas["m-0"].given_up == (count == 5)
        now += 100.0
        state = after(state, now)
    assert plan(state, 1e9).steps == ()
    again, applied = apply(state, spec("m"), 2_000.0)
    assert not applied.changed
    assert [step.kind for step in plan(again, 3_000.0).steps] == [StepKind.RESTART]


def test_a_lost_node_is_reaped_and_its_replicas_go_elsewhere_without_blame() -> None:
    state = serving(after(fleet({"n1": inventory(), "n2": inventory()}, spec("m", replicas=2))))
    state = node_lost(state, "n1", "i1", "its agent is silent", 20.0)
    assert text(plan(state, 21.0)) == ["reap m-0: n1 is lost"]
    state = after(state, 21.0)
    assert state.replicas["m-0"].failures == ()
    decided = plan(state, 21.0)
    assert [(step.kind, step.replica) for step in decided.steps] == [(StepKind.RESTART, "m-0")]
    assert commit(state, decided, 21.0).replicas["m-0"].nodes == ("n2",)


def test_an_old_incarnation_cannot_lose_a_node() -> None:
    state = node_joined(fleet({"n1": inventory()}), "n1", "i2", inventory(), 5.0)
    assert node_lost(state, "n1", "i1", "silent", 6.0) is state
    assert node_lost(state, "n1", "i2", "silent", 6.0).nodes["n1"].state is NodeState.LOST


def test_a_start_nobody_acknowledged_is_sent_again() -> None:
    state = after(fleet({"n1": inventory()}, spec("m")))
    assert next_deadline(state, 10.0) == 40.0
    assert text(plan(state, 40.0)) == ["resume start m-0: its start was not acknowledged"]
    assert next_deadline(after(state, 40.0), 40.0) == 70.0


def test_what_is_not_wanted_any_more_is_stopped_and_never_started_again() -> None:
    # Found by the state machine: the start was sent again in one pass and stopped in the next.
    unacknowledged = scale(after(fleet({"n1": inventory()}, spec("m"))), "m", 0)
    assert text(plan(unacknowledged, 100.0)) == ["scale down m-0: wanted 0: 0 of 1 stay"]
    broken = scale(failed(after(fleet({"n1": inventory()}, spec("m"))), "m-0", Reason.EXITED, 20.0), "m", 0)
    assert text(plan(broken, 100.0)) == ["scale down m-0: wanted 0: 0 of 1 stay"]


def test_a_refusal_is_said_as_things_stand_after_the_pass() -> None:
    # Found by the state machine: the refusal named memory that the same pass gave to another model.
    state = after(fleet({"n1": inventory(memory=GIB)}, spec("a"), spec("b", memory=2 * GIB, priority=99)))
    assert state.models["b"].waiting == "0/1 nodes fit b: 1 memory (need 2 GiB, best free 0 B on n1)"
    assert plan(state, 11.0).steps == ()


def test_a_model_that_is_placed_in_part_still_says_why_the_rest_waits() -> None:
    # Found by the state machine: the restart of one replica took back what was said of the other.
    state = after(fleet({"n1": inventory(memory=GIB)}, spec("m", replicas=2)))
    waiting = "0/1 nodes fit m: 1 memory (need 1 GiB, best free 0 B on n1)"
    assert state.models["m"].waiting == waiting
    state = after(failed(state, "m-0", Reason.EXITED, 20.0), 30.0)
    assert state.replicas["m-0"].state is ReplicaState.PLACED
    assert state.models["m"].waiting == waiting
    assert plan(state, 31.0).steps == ()


def test_a_changed_spec_starts_its_version_before_the_old_one_goes() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    state, applied = apply(state, spec("m", context=4096), 20.0)
    assert (applied.changed, applied.spec_version) == (True, 2)
    state = after(state, 21.0)
    assert {r.id: (r.spec_version, r.state) for r in state.replicas.values()} == {
        "m-0": (1, ReplicaState.SERVING),
        "m-1": (2, ReplicaState.PLACED),
    }
    state = serving(state, 22.0)
    assert text(plan(state, 23.0)) == ["drain m-0: version 2 of the spec replaces version 1"]


def test_a_count_or_priority_is_no_new_version() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    state, applied = apply(state, spec("m", replicas=2, priority=9), 20.0)
    assert (applied.changed, applied.spec_version) == (True, 1)
    assert [step.kind for step in plan(state, 21.0).steps] == [StepKind.SCALE_UP]


def test_a_plan_on_a_state_that_moved_is_refused_for_what_it_touches_only() -> None:
    state = fleet({"n1": inventory(), "n2": inventory()}, spec("m"))
    decided = plan(state, 10.0)
    assert moved(state, decided) == ()
    assert moved(cordon(state, "n1", True, 9.0), decided) == ("node/n1",)
    assert moved(cordon(state, "n2", True, 9.0), decided) == ()
    assert moved(scale(state, "m", 5), decided) == ("model/m",)


@pytest.mark.parametrize(("failures", "low", "high"), [(1, 1, 1.25), (3, 4, 5), (7, 60, 75), (100, 60, 75)])
def test_backoff_doubles_to_its_cap_with_a_quarter_of_jitter(failures: int, low: float, high: float) -> None:
    waits = {backoff_s(RestartPolicy(), f"m-{number}", failures) for number in range(50)}
    assert low <= min(waits)
    assert max(waits) <= high
    assert len(waits) > 25

"""More of the planner as tables: constraints, gangs, rollouts, drains, demand, eviction, preemption, the brake."""

import pytest

from fleet.commits import commit
from fleet.demand import SMOOTHING_S
from fleet.facts import Load, ReplicaEvent, loaded, node_joined, node_lost, replica_changed, used
from fleet.forecast import obeyed, passes
from fleet.placement import place
from fleet.planning import next_deadline, next_pass, plan
from fleet.reasons import Failure, Reason
from fleet.room import room_of
from fleet.spec import Constraints, ModelSpec, Rollout, Scaling
from fleet.standing import wanted
from fleet.state import FleetState, ForcedEnd, NodeState, ReplicaState
from fleet.steps import StepKind, brief
from fleet.wishes import abandon, apply, cordon, drain_node, release_brake, retry, scale
from tests.fleets import GIB, fleet, inventory, spec
from tests.test_planning import after, serving, text


def stopped(state: FleetState, replica: str, now: float) -> FleetState:
    """A replica drained and ended."""
    generation = state.replicas[replica].generation
    for told in (ReplicaState.DRAINED, None):
        state = replica_changed(state, ReplicaEvent(replica=replica, generation=generation, state=told), now)
    return state


# -- where it may go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        (Constraints(labels={"zone": "b"}), {"n2"}),
        (Constraints(labels={"zone": "c"}), set()),
        (Constraints(role="big"), {"n3"}),
        (Constraints(gpu_model="h100"), {"n1", "n2", "n3"}),
        (Constraints(gpu_model="a100"), set()),
    ],
)
def test_constraints_exclude_nodes_and_say_why(constraints: Constraints, expected: set[str]) -> None:
    nodes = {
        "n1": inventory(gpus=(80 * GIB,), labels={"zone": "a"}),
        "n2": inventory(gpus=(80 * GIB,), labels={"zone": "b"}),
        "n3": inventory(gpus=(80 * GIB,), roles=("big",)),
    }
    model = spec("m", gpus=1, constraints=constraints)
    decision = place(model, "m-0", room_of(fleet(nodes, model)))
    assert {verdict.node for verdict in decision.verdicts if verdict.outcome.value == "fits"} == expected
    assert all(verdict.reason is not None for verdict in decision.verdicts if verdict.node not in expected)


def test_a_preferred_label_draws_and_its_part_is_kept() -> None:
    nodes = {"n1": inventory(), "n2": inventory(labels={"disk": "nvme"})}
    model = spec("m", constraints=Constraints(prefer={"disk": "nvme", "zone": "a"}))
    decision = place(model, "m-0", room_of(fleet(nodes, model)))
    assert decision.shards[0].node == "n2"
    assert [verdict.parts["preferred"] for verdict in decision.verdicts] == [0.0, 0.5]


def test_a_gang_is_whole_or_not_at_all_and_keeps_to_one_interconnect() -> None:
    nodes = {
        "n1": inventory(labels={"ib": "x"}),
        "n2": inventory(labels={"ib": "y"}),
        "n3": inventory(labels={"ib": "y"}),
        "n4": inventory(),
    }
    model = spec("m", shards=2, constraints=Constraints(interconnect="ib"))
    decision = place(model, "m-0", room_of(fleet(nodes, model)))
    assert [shard.node for shard in decision.shards] == ["n2", "n3"]
    three = place(spec("m", shards=3), "m-0", room_of(fleet({"n1": nodes["n1"], "n2": nodes["n2"]})))
    assert three.shards == ()
    assert three.sentence == "0/2 nodes fit m: 2 gang_incomplete (all 3 shards or none, only 2 fit together)"


# -- rollouts ---------------------------------------------------------------------------------------------------------


def test_a_rollout_surges_and_never_falls_below_the_wanted_number() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m", replicas=2))))
    state, _ = apply(state, spec("m", replicas=2, context=4096), 20.0)
    seen = []
    for turn in range(8):
        now = 21.0 + turn
        decided = plan(state, now)
        if not decided.steps:
            break
        seen.append([f"{step.kind} {step.replica}" for step in decided.steps])
        state = serving(commit(state, decided, now), now)
        for replica in list(state.replicas.values()):
            if replica.state is ReplicaState.DRAINING:
                state = stopped(state, replica.id, now)
        assert sum(r.state is ReplicaState.SERVING for r in state.replicas.values()) >= 2
    assert seen == [["scale up m-2"], ["drain m-0", "scale up m-3"], ["drain m-1"]]


def test_a_version_that_fails_leaves_the_old_one_serving() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    state, _ = apply(state, spec("m", context=4096), 20.0)
    state = after(state, 21.0)
    failure = Failure(reason=Reason.BAD_FLAG, detail="no such flag")
    new = state.replicas["m-1"]
    event = ReplicaEvent(replica="m-1", generation=new.generation, state=ReplicaState.FAILED, failure=failure)
    state = replica_changed(state, event, 22.0)
    assert state.replicas["m-1"].given_up
    assert plan(state, 23.0).quiet
    assert state.replicas["m-0"].state is ReplicaState.SERVING
    again = retry(state, "m", 30.0)
    assert [step.kind for step in plan(again, 40.0).steps] == [StepKind.RESTART]


def test_without_room_a_rollout_waits_unless_the_spec_allows_to_recreate() -> None:
    nodes = {"n1": inventory(memory=GIB)}
    state = serving(after(fleet(nodes, spec("m"))))
    waits, _ = apply(state, spec("m", context=4096), 20.0)
    assert [step.kind for step in plan(waits, 21.0).steps] == [StepKind.SCALE_UP]
    waits = after(waits, 21.0)
    assert waits.models["m"].waiting.startswith("0/1 nodes fit m")
    assert waits.replicas["m-0"].state is ReplicaState.SERVING
    assert plan(waits, 22.0).quiet

    goes, _ = apply(state, spec("m", context=4096, rollout=Rollout(recreate=True)), 20.0)
    assert text(plan(goes, 21.0))[0] == ("drain m-0: version 2 has no room beside it, and its rollout may recreate")


# -- draining a node --------------------------------------------------------------------------------------------------


def test_a_drained_node_is_emptied_after_its_replacements_serve() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    state = node_joined(state, "n2", "i1", inventory(), 12.0)
    state = drain_node(state, "n1", 600.0, 20.0)
    assert text(plan(state, 21.0)) == ["scale up m-1: wanted 1, there are 0 that may stay → m goes to n2"]
    state = serving(after(state, 21.0), 22.0)
    assert text(plan(state, 23.0)) == ["drain m-0: n1 drains"]


def test_what_cannot_be_moved_is_drained_at_the_deadline() -> None:
    state = drain_node(serving(after(fleet({"n1": inventory()}, spec("m")))), "n1", 60.0, 20.0)
    state = after(state, 21.0)
    assert plan(state, 22.0).quiet
    assert next_deadline(state, 22.0) == 80.0
    assert text(plan(state, 80.0))[0] == "drain m-0: the deadline of the drain of n1 passed"
    assert cordon(state, "n1", False, 90.0).nodes["n1"].state is NodeState.READY


# -- demand -----------------------------------------------------------------------------------------------------------

ELASTIC = Scaling(min=0, max=3, target_in_flight=2.0, cooldown_s=30.0, idle_after_s=100.0)


def busy(state: FleetState, in_flight: int, now: float) -> FleetState:
    for node in state.nodes.values():
        loads = tuple(
            Load(replica=replica.id, generation=replica.generation, in_flight=in_flight)
            for replica in state.replicas.values()
            if node.id in replica.nodes
        )
        state = loaded(state, node.id, node.incarnation, loads, now)
    return state


def test_demand_scales_up_at_once_and_down_after_the_cooldown() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m", scaling=ELASTIC))))
    assert wanted(state, state.models["m"]) == 1
    state = busy(state, 6, 20.0)
    assert text(plan(state, 20.0)) == [
        "scale up m-1: 6.0 in flight, 2 a replica, there are 1 → m goes to n1",
        "scale up m-2: 6.0 in flight, 2 a replica, there are 2 → m goes to n1",
    ]
    state = serving(after(state, 20.0), 21.0)
    state = busy(state, 0, 25.0)
    assert plan(state, 30.0).quiet
    later = 25.0 + 6 * SMOOTHING_S
    decided = plan(state, later)
    assert [step.kind for step in decided.steps] == [StepKind.SCALE_DOWN, StepKind.SCALE_DOWN]
    assert decided.scaled == {"m": 1}


def test_an_idle_model_goes_to_zero_and_a_request_brings_it_back() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m", scaling=ELASTIC))))
    assert plan(state, 100.0).quiet
    assert text(plan(state, 112.0)) == ["scale down m-0: no request for 100 s: 0 of 1 stay"]
    state = stopped(after(state, 112.0), "m-0", 113.0)
    assert plan(state, 200.0).quiet
    woken = used(state, "m", 201.0)
    assert text(plan(woken, 201.0)) == ["scale up m-1: a request came, there are 0 → m goes to n1"]


def test_what_failed_works_on_nothing_and_keeps_no_model_from_being_idle() -> None:
    state = busy(serving(after(fleet({"n1": inventory()}, spec("m", scaling=ELASTIC)))), 3, 20.0)
    state = node_lost(state, "n1", "i1", "its agent left", 21.0, left=True)
    state = after(state, 22.0)
    assert state.replicas["m-0"].in_flight == 3
    state, _ = apply(state, spec("m", scaling=ELASTIC, context=4096), 23.0)
    decided = plan(state, 900.0)
    assert decided.scaled == {"m": 0}
    assert plan(commit(state, decided, 900.0), 900.0).quiet


def test_one_long_request_keeps_a_model_from_being_idle() -> None:
    state = busy(serving(after(fleet({"n1": inventory()}, spec("m", scaling=ELASTIC)))), 1, 20.0)
    assert plan(state, 10_000.0).quiet


# -- room for others --------------------------------------------------------------------------------------------------


def crowded(*specs: ModelSpec) -> FleetState:
    """A node of 4 GiB with these, serving since 10."""
    return serving(after(fleet({"n1": inventory(memory=4 * GIB)}, *specs)))


def test_idle_models_are_evicted_least_recently_used_first_and_no_more_than_needed() -> None:
    elastic = Scaling(min=0, max=1, idle_after_s=10_000.0)
    state = crowded(spec("a", scaling=elastic, memory=2 * GIB), spec("b", scaling=elastic, memory=2 * GIB))
    state = used(state, "a", 50.0)
    state, _ = apply(state, spec("c", memory=2 * GIB), 200.0)
    decided = plan(state, 201.0)
    assert text(decided) == [
        "evict b-0: idle, and c needs the room: frees 2 GiB on n1",
        (
            "scale up c-0: wanted 1, there are 0 → 0/1 nodes fit c: 1 memory (need 2 GiB, best free 0 B on n1); "
            "room is being made"
        ),
    ]
    assert decided.scaled == {"b": 0}
    state = commit(state, decided, 201.0)
    assert plan(state, 202.0).quiet
    state = stopped(state, "b-0", 203.0)
    assert text(plan(state, 204.0)) == ["scale up c-0: wanted 1, there are 0 → c goes to n1"]
    assert plan(serving(after(state, 204.0), 205.0), 300.0).quiet, (
        "what was evicted stays away until somebody asks for it"
    )


def test_models_that_may_not_go_to_zero_or_are_in_use_are_not_evicted() -> None:
    state = crowded(spec("a", memory=2 * GIB), spec("b", memory=2 * GIB, scaling=Scaling(min=0, max=1)))
    state, _ = apply(used(state, "b", 190.0), spec("c", memory=2 * GIB), 200.0)
    assert [step.kind for step in plan(state, 201.0).steps] == [StepKind.SCALE_UP]


def test_a_model_that_works_on_an_old_request_is_not_idle() -> None:
    """Its node tells of a request that lasts only every minute, and by then it would have been evicted."""
    elastic = Scaling(min=0, max=1, target_in_flight=4, idle_after_s=10_000.0)
    state = crowded(spec("a", scaling=elastic, memory=4 * GIB))
    state, _ = apply(busy(state, 1, 20.0), spec("c", memory=4 * GIB), 85.0)
    assert [step.kind for step in plan(state, 90.0).steps] == [StepKind.SCALE_UP]
    assert text(plan(busy(state, 0, 95.0), 160.0))[0].startswith("evict a-0")


def test_preemption_takes_the_fewest_and_cheapest_of_lower_priority() -> None:
    state = crowded(spec("small", priority=1), spec("large", memory=3 * GIB, priority=1))
    state, _ = apply(state, spec("vip", memory=3 * GIB, priority=90), 20.0)
    decided = plan(state, 21.0)
    assert text(decided)[0] == "preempt large-0: vip is more important (90 against 1): frees 3 GiB on n1"
    assert [step.replica for step in decided.steps if step.kind is StepKind.PREEMPT] == ["large-0"]
    state = stopped(commit(state, decided, 21.0), "large-0", 22.0)
    settled = after(state, 23.0)
    assert settled.replicas["vip-0"].state is ReplicaState.PLACED
    assert settled.models["large"].waiting.startswith("0/1 nodes fit large")
    assert plan(settled, 24.0).quiet


def test_equals_are_not_preempted_and_nothing_is_ended_in_vain() -> None:
    state = crowded(spec("a", memory=4 * GIB, priority=50))
    same, _ = apply(state, spec("b", memory=GIB, priority=50), 20.0)
    assert [step.kind for step in plan(same, 21.0).steps] == [StepKind.SCALE_UP]
    vain, _ = apply(state, spec("b", memory=5 * GIB, priority=90), 20.0)
    assert [step.kind for step in plan(vain, 21.0).steps] == [StepKind.SCALE_UP]


def test_room_that_is_being_made_is_kept_for_whom_it_is_made() -> None:
    state = crowded(spec("old", memory=3 * GIB, priority=1))
    state, _ = apply(state, spec("vip", memory=4 * GIB, priority=90), 20.0)
    state = after(state, 21.0)
    state, _ = apply(state, spec("late", memory=GIB, priority=10), 22.0)
    assert text(plan(state, 23.0)) == [
        "scale up late-0: wanted 1, there are 0 → late would fit, but that room is kept for vip"
    ]


# -- losses -----------------------------------------------------------------------------------------------------------


def test_a_mass_loss_pulls_the_brake_until_nodes_return() -> None:
    state = serving(after(fleet({name: inventory() for name in ("n1", "n2", "n3")}, spec("m", replicas=3))))
    state = node_lost(state, "n1", "i1", "silent", 20.0)
    assert not state.brake
    state = node_lost(state, "n2", "i1", "silent", 21.0)
    assert state.brake == "2 of 3 nodes are lost: nothing is reaped until some are back"
    assert plan(state, 22.0).quiet
    back = node_joined(state, "n1", "i2", inventory(), 30.0)
    assert not back.brake
    assert [step.replica for step in plan(back, 31.0).steps] == ["m-1"]
    released = release_brake(state)
    assert [step.kind for step in plan(released, 31.0).steps] == [StepKind.REAP, StepKind.REAP]


def test_a_node_that_says_goodbye_is_reaped_whatever_the_brake_says() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    state = node_lost(state, "n1", "i1", "its agent left", 20.0, left=True)
    assert not state.brake
    assert [step.kind for step in plan(state, 21.0).steps] == [StepKind.REAP]


# -- what is said twice, and what is taken back -----------------------------------------------------------------------


def test_a_drain_or_stop_that_nobody_carried_out_is_said_again() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    drained = commit(state, plan(drain_node(state, "n1", 0.0, 20.0), 20.0), 20.0)
    assert drained.replicas["m-0"].state is ReplicaState.DRAINING
    assert next_deadline(drained, 20.0) == 80.0
    assert text(plan(drained, 80.0))[0] == "drain m-0: it was told to and has not: said again"


def test_a_drain_that_ended_by_force_is_remembered_and_said() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m"))))
    state = commit(state, plan(drain_node(state, "n1", 0.0, 20.0), 20.0), 20.0)
    event = ReplicaEvent(replica="m-0", generation=1, state=ReplicaState.DRAINED, left_in_flight=2)
    state = replica_changed(state, event, 50.0)
    assert text(plan(state, 51.0))[0] == "stop replica m-0: it is drained, by its deadline: 2 requests in flight"
    assert state.forced == (ForcedEnd(replica="m-0", model="m", nodes=("n1",), requests=2, at=50.0),)
    assert replica_changed(state, event, 52.0).forced == state.forced, "told twice, it is one"
    gone = ReplicaEvent(replica="m-0", generation=1, state=None)
    assert replica_changed(state, gone, 60.0).forced == state.forced


def test_a_job_takes_back_only_what_it_alone_wanted() -> None:
    state, _ = apply(fleet({"n1": inventory()}), spec("m"), 1.0, job="one")
    assert abandon(state, "m", "two") is state
    shared, _ = apply(state, spec("m"), 2.0, job="two")
    assert abandon(shared, "m", "one") is shared
    assert abandon(state, "m", "one").models == {}


def test_a_plan_is_sent_with_few_verdicts_and_a_bounded_number_of_steps() -> None:
    nodes = {f"n{number:02}": inventory() for number in range(30)}
    decided = plan(fleet(nodes, spec("m", replicas=9), spec("big", memory=99 * GIB)), 10.0)
    short = brief(decided, 9)
    assert len(short.steps) == 9
    assert [len(step.decision.verdicts) for step in short.steps if step.decision] == [4] * 9
    whole = brief(decided, 100)
    assert [len(step.decision.verdicts) for step in whole.steps if step.decision and not step.decision.shards] == [20]


# -- what the golden texts showed -------------------------------------------------------------------------------------


def test_an_idle_model_is_looked_at_again_when_it_may_be_evicted_for_one_that_waits() -> None:
    idle = spec("idle", memory=4 * GIB, scaling=Scaling(min=0, max=1, idle_after_s=3600))
    state = serving(after(fleet({"n1": inventory(memory=4 * GIB)}, idle)), 11.0)
    state = after(apply(used(state, "idle", 100.0), spec("m", memory=4 * GIB), 110.0)[0], 110.0)
    assert state.models["m"].waiting
    due = next_pass(state, 110.0)
    assert due is not None
    assert 160.0 < due < 161.0
    assert text(plan(state, due))[0].startswith("evict idle-0")


def test_a_rollout_ends_on_as_many_nodes_as_it_began() -> None:
    policy = Rollout(max_surge=0, max_unavailable=1)
    nodes = {name: inventory(memory=8 * GIB) for name in ("n1", "n2")}
    state = serving(after(fleet(nodes, spec("m", memory=4 * GIB, replicas=2, rollout=policy))))
    state, _ = apply(state, spec("m", memory=4 * GIB, replicas=2, rollout=policy, context=4096), 20.0)
    for done in passes(state, 21.0):
        state = obeyed(commit(done.state, done.plan, 21.0), 21.0)
    assert sorted(replica.nodes for replica in state.replicas.values()) == [("n1",), ("n2",)]


def test_of_two_victims_alike_the_smaller_one_goes() -> None:
    low = [spec("large", memory=8 * GIB, priority=10), spec("small", memory=2 * GIB, priority=10)]
    state = serving(after(fleet({"n1": inventory(memory=8 * GIB), "n2": inventory(memory=2 * GIB)}, *low)))
    state, _ = apply(state, spec("m", memory=2 * GIB, priority=90), 20.0)
    assert text(plan(state, 21.0))[0].startswith("preempt small-0")


def test_who_works_on_the_least_is_told_by_what_is_in_flight_now() -> None:
    state = serving(after(fleet({"n1": inventory()}, spec("m", replicas=2))))
    state = loaded(state, "n1", "i1", (Load(replica="m-0", generation=1, in_flight=9),), 20.0)
    quiet = (Load(replica="m-0", generation=1, in_flight=0), Load(replica="m-1", generation=2, in_flight=1))
    state = scale(loaded(state, "n1", "i1", quiet, 21.0), "m", 1)
    assert [step.replica for step in plan(state, 300.0).steps] == ["m-0"]

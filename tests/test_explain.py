"""What would change a refusal, as tables: each way out is tried, so each is shown to be enough."""

import pytest

from fleet.commits import commit
from fleet.explain import WayOut, explain
from fleet.facts import ReplicaEvent, node_lost, replica_changed
from fleet.planning import plan
from fleet.reasons import Failure, Reason
from fleet.spec import Constraints, ModelSpec
from fleet.state import CPU, Device, FleetState, Inventory, NodeState, ReplicaState
from fleet.wishes import apply, cordon, drain_node
from tests.fleets import GIB, fleet, inventory, spec

NOW = 10.0


def placed(state: FleetState) -> FleetState:
    state = commit(state, plan(state, NOW), NOW)
    for replica in list(state.replicas.values()):
        event = ReplicaEvent(replica=replica.id, generation=replica.generation, state=ReplicaState.SERVING)
        state = replica_changed(state, event, NOW)
    return state


def with_model(state: FleetState, wanted: ModelSpec) -> FleetState:
    return apply(state, wanted, NOW)[0]


def foreign(memory: int, held: int, *pids: int) -> Inventory:
    return inventory(devices=(Device(uuid=CPU, total=memory, foreign=held, holders=pids),))


def ways(state: FleetState, name: str = "m") -> list[str]:
    return [way.sentence for way in explain(state, state.models[name]).ways]


def cordoned() -> FleetState:
    return cordon(fleet({"n1": inventory(), "n2": inventory(memory=GIB // 2)}, spec("m")), "n1", True, 3.0)


def draining() -> FleetState:
    return drain_node(fleet({"n1": inventory()}, spec("m")), "n1", 60.0, 3.0)


def lost() -> FleetState:
    return node_lost(fleet({"n1": inventory()}, spec("m")), "n1", "i1", "silent", 3.0)


def taken(priority: int = 10) -> FleetState:
    return with_model(
        placed(fleet({"n4": inventory(memory=46 * GIB)}, spec("x", memory=40 * GIB, priority=priority))),
        spec("m", memory=40 * GIB),
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (fleet({"n1": inventory()}, spec("m")), []),
        (cordoned(), ["uncordon n1"]),
        (draining(), ["uncordon n1"]),
        (lost(), ["bring the agent of n1 back"]),
        (fleet({"n3": inventory(engines=())}, spec("m")), ["add llamacpp to n3's agent.yaml"]),
        (
            fleet({"n1": inventory()}, spec("m", constraints=Constraints(labels={"zone": "a", "rack": "r1"}))),
            ["label n1 rack=r1, zone=a in its agent.yaml"],
        ),
        (
            fleet({"n1": inventory()}, spec("m", constraints=Constraints(role="gpu"))),
            ["give n1 the role gpu in its agent.yaml"],
        ),
        (fleet({"n1": inventory(disk=GIB // 4)}, spec("m")), ["free 768 MiB of disk on n1"]),
        (taken(), ["n4 lacks 34 GiB: stop x-0 (priority 10, 40 GiB)"]),
        (taken(priority=90), ["n4 lacks 34 GiB: stop x-0 (priority 90, 40 GiB)"]),
        (
            fleet({"n1": foreign(16 * GIB, 12 * GIB, 41, 42)}, spec("m", memory=8 * GIB)),
            ["n1 lacks 4 GiB: end pid 41 and others, which hold 12 GiB"],
        ),
        (
            fleet({"n1": foreign(16 * GIB, 12 * GIB)}, spec("m", memory=8 * GIB)),
            ["n1 lacks 4 GiB: end processes that are not llmgw's, which hold 12 GiB"],
        ),
        (
            cordon(fleet({"n1": inventory(engines=())}, spec("m")), "n1", True, 3.0),
            ["uncordon n1, and add llamacpp to n1's agent.yaml"],
        ),
        (fleet({"n1": inventory(memory=GIB)}, spec("m", memory=2 * GIB)), []),
        (fleet({"n1": inventory(gpus=(GIB,))}, spec("m", gpus=2)), []),
        (fleet({}, spec("m")), []),
    ],
    ids=[
        "fits",
        "cordoned",
        "draining",
        "lost",
        "engine",
        "labels",
        "role",
        "disk",
        "memory",
        "memory of what is more important",
        "foreign memory",
        "foreign memory of nobody known",
        "two things at once",
        "too small",
        "too few gpus",
        "no node",
    ],
)
def test_the_ways_out(state: FleetState, expected: list[str]) -> None:
    assert ways(state) == expected


def test_the_nearest_way_out_comes_first() -> None:
    nodes = {
        "n1": inventory(memory=10 * GIB),
        "n2": inventory(memory=10 * GIB),
        "n3": inventory(memory=10 * GIB, engines=()),
    }
    busy = placed(fleet(nodes, spec("dear", memory=6 * GIB, priority=80), spec("cheap", memory=6 * GIB, priority=5)))
    state = with_model(busy, spec("m", memory=8 * GIB))
    assert ways(state) == [
        "add llamacpp to n3's agent.yaml",
        "n2 lacks 4 GiB: stop cheap-0 (priority 5, 6 GiB)",
        "n1 lacks 4 GiB: stop dear-0 (priority 80, 6 GiB)",
    ]


def test_only_who_is_needed_is_stopped() -> None:
    specs = [spec(name, memory=size * GIB, priority=size) for name, size in (("a", 1), ("b", 2), ("c", 6))]
    state = with_model(placed(fleet({"n1": inventory(memory=10 * GIB)}, *specs)), spec("m", memory=7 * GIB))
    [way] = explain(state, state.models["m"]).ways
    assert way.stops == ("c-0",)


def test_both_others_and_replicas_where_neither_is_enough() -> None:
    state = placed(fleet({"n1": foreign(16 * GIB, 6 * GIB, 41)}, spec("x", memory=6 * GIB)))
    state = with_model(state, spec("m", memory=15 * GIB))
    assert ways(state) == [
        "n1 lacks 11 GiB: stop x-0 (priority 50, 6 GiB), and end pid 41 and others, which hold 6 GiB"
    ]


def test_a_way_out_is_enough() -> None:
    opened = cordon(cordoned(), "n1", False, 4.0)
    assert explain(opened, opened.models["m"]).now.shards
    stopped = taken().without_replica("x-0")
    assert explain(stopped, stopped.models["m"]).now.shards


def test_a_gang_says_how_many_nodes_it_lacks() -> None:
    state = fleet({"n1": inventory(), "n2": inventory(engines=())}, spec("m", shards=2))
    explanation = explain(state, state.models["m"])
    assert explanation.more == 1
    assert explanation.ways == (WayOut(node="n2", acts=("add llamacpp to n2's agent.yaml",)),)


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        (fleet({}, spec("m")), ("start an agent: no node has joined",)),
        (
            fleet({"n1": inventory(memory=GIB)}, spec("m", memory=2 * GIB)),
            ("free memory on a node or add one", "no device is large enough: 2 GiB of 1 GiB on n1"),
        ),
        (
            cordon(fleet({"n1": inventory(memory=GIB)}, spec("m", memory=2 * GIB)), "n1", True, 3.0),
            ("add a node: those that are closed or lost could not take it either",),
        ),
    ],
)
def test_where_no_node_can_be_made_to_fit_there_is_advice(state: FleetState, advice: tuple[str, ...]) -> None:
    explanation = explain(state, state.models["m"])
    assert (explanation.ways, explanation.advice) == ((), advice)


def test_what_was_decided_and_what_was_given_up() -> None:
    state = placed(fleet({"n1": inventory()}, spec("m")))
    served = explain(state, state.models["m"])
    assert served.last is not None
    assert (served.last.replica, served.now.replica, served.waiting) == ("m-0", "m-1", "")
    failure = Failure(reason=Reason.BAD_FLAG, detail="unrecognized arguments: --fast")
    event = ReplicaEvent(replica="m-0", generation=1, state=ReplicaState.FAILED, failure=failure)
    failed = replica_changed(state, event, 20.0)
    given_up = explain(failed, failed.models["m"])
    assert (given_up.failure, given_up.now.replica) == (failure, "m-0")


def test_the_state_is_left_as_it_was() -> None:
    state = cordoned()
    explain(state, state.models["m"])
    assert state.nodes["n1"].state is NodeState.CORDONED

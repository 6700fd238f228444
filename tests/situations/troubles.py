"""What broke, and what is done about it."""

from fleet.facts import node_joined, node_lost
from fleet.planning import backoff_s
from fleet.reasons import Reason
from fleet.state import FleetState, ReplicaState, RestartPolicy
from fleet.wishes import release_brake
from tests.situations.fleets import Moment, broke, fleet, inventory, planned, served, spec, told

SILENT = "its lease ran out, and nobody took it up"


def pair() -> FleetState:
    return served(fleet({"n1": inventory(), "n2": inventory()}, spec("m", replicas=2)), 10.0)


def four(*lost: str) -> FleetState:
    """Four nodes with a replica each, of which some are lost."""
    state = served(fleet({f"n{number}": inventory() for number in range(1, 5)}, spec("m", replicas=4)), 10.0)
    for name in lost:
        state = node_lost(state, name, "i1", SILENT, 100.0)
    return state


def reap_after_the_grace() -> Moment:
    """One of two nodes is lost: its replica is taken from it, and then placed on the other."""
    return Moment(node_lost(pair(), "n1", "i1", SILENT, 100.0), 100.0)


def brake_on() -> Moment:
    """Three of four nodes are lost at once: rather the network is ill, and nothing is reaped."""
    return Moment(four("n1", "n2", "n3"), 110.0)


def brake_released() -> Moment:
    """The operator says that the nodes are gone for good: now they are reaped."""
    return Moment(release_brake(four("n1", "n2", "n3")), 120.0)


def a_node_returns_too_late() -> Moment:
    """A lost node is back after its replica was placed elsewhere: its engine of the old generation is not claimed."""
    state = planned(node_lost(pair(), "n1", "i1", SILENT, 100.0), 100.0)
    state = served(state, 101.0)
    return Moment(node_joined(state, "n1", "i2", inventory(), 200.0), 200.0)


def restart_waits() -> Moment:
    """An engine has just ended: it is started again after its back-off, not before."""
    state = served(fleet({"n1": inventory()}, spec("m")), 10.0)
    return Moment(broke(state, "m-0", Reason.EXITED, "killed by signal 9", 20.0), 20.5)


def restart_is_due() -> Moment:
    """The third failure within the window: after four seconds it is started again, where its weights are."""
    nodes = {"n1": inventory(), "n2": inventory(weights=("m-abc",))}
    state, now = served(fleet(nodes, spec("m")), 10.0), 20.0
    for _ in range(3):
        state = broke(state, "m-0", Reason.EXITED, "killed by signal 9", now)
        due = now + backoff_s(RestartPolicy(), "m-0", len(state.replicas["m-0"].failures))
        now = due + 1 if len(state.replicas["m-0"].failures) < 3 else due
        state = served(state, due) if len(state.replicas["m-0"].failures) < 3 else state
    return Moment(state, now)


def restarts_are_exhausted() -> Moment:
    """The fifth failure within ten minutes: it is given up, and stays so until somebody applies or retries it."""
    state = served(fleet({"n1": inventory()}, spec("m")), 10.0)
    for number in range(5):
        state = broke(state, "m-0", Reason.EXITED, "killed by signal 9", 100.0 + 80 * number)
        state = served(state, 170.0 + 80 * number)
    return Moment(state, 10_000.0)


def no_retry_can_help() -> Moment:
    """A wrong flag fails the same way each time: it is given up at once."""
    state = planned(fleet({"n1": inventory()}, spec("m")), 10.0)
    return Moment(broke(state, "m-0", Reason.BAD_FLAG, "unknown argument --flah", 12.0), 1_000.0)


def a_start_nobody_acknowledged() -> Moment:
    """The pass that placed it died before it told anybody: the same start is sent again."""
    return Moment(planned(fleet({"n1": inventory()}, spec("m")), 10.0), 40.0)


def a_drain_nobody_acknowledged() -> Moment:
    """A drain was decided and not heard of long after its deadline: it is said again."""
    state = served(fleet({"n1": inventory()}, spec("m")), 10.0)
    record = state.replicas["m-0"].model_copy(update={"state": ReplicaState.DRAINING, "since": 20.0})
    return Moment(state.with_replica(record), 80.0)


def a_gang_loses_one_node() -> Moment:
    """One node of a gang is lost: the whole replica is taken from all of its nodes."""
    nodes = {f"n{number}": inventory(gpus=(80 * 1024**3,)) for number in range(1, 4)}
    state = served(fleet(nodes, spec("m", memory=70 * 1024**3, gpus=1, shards=2)), 10.0)
    state = told(state, "m-0", ReplicaState.SERVING, 12.0)
    return Moment(node_lost(state, "n1", "i1", SILENT, 100.0), 100.0)

"""What takes the place of what serves: a new version, and the end of a node's service."""

from fleet.reasons import Reason
from fleet.spec import ModelSpec, Rollout
from fleet.state import FleetState, Inventory, ReplicaState
from fleet.wishes import drain_node
from tests.situations.fleets import GIB, Moment, broke, busy, fleet, inventory, planned, served, spec, told, wanted

ROOMY = {"n1": inventory(memory=8 * GIB), "n2": inventory(memory=8 * GIB)}
FULL = {"n1": inventory(memory=4 * GIB)}


def version(number: int, replicas: int, rollout: Rollout) -> ModelSpec:
    """One version of `m`: they differ by their context."""
    return spec("m", memory=4 * GIB, replicas=replicas, context=2048 * number, rollout=rollout)


def changed(nodes: dict[str, Inventory], replicas: int = 1, **rollout: object) -> FleetState:
    """Version 1 serves, and version 2 was applied at 20 s."""
    policy = Rollout.model_validate(rollout)
    state = served(fleet(nodes, version(1, replicas, policy)), 10.0)
    return wanted(state, version(2, replicas, policy), now=20.0)


def update_by_surge() -> Moment:
    """A changed spec: one new replica beyond the wanted number serves before an old one goes, one after the other."""
    return Moment(changed(ROOMY, replicas=2), 20.0)


def update_by_unavailability() -> Moment:
    """No surge is allowed, but one may be missing: an old one goes first."""
    return Moment(changed(ROOMY, replicas=2, max_surge=0, max_unavailable=1), 20.0)


def update_that_fails() -> Moment:
    """The new version was given up: the old one goes on serving, and the other old replicas are not touched."""
    state = planned(changed(ROOMY, replicas=2), 20.0)
    return Moment(broke(state, "m-2", Reason.BAD_FLAG, "unknown argument --flah", 25.0), 30.0)


def update_without_room() -> Moment:
    """There is no room beside the old version, and it must not go first: the update waits and says so."""
    return Moment(changed(FULL), 20.0)


def update_that_recreates() -> Moment:
    """There is no room beside the old version, and the rollout allows to stop it first."""
    return Moment(changed(FULL, recreate=True), 20.0)


def drain_of_a_node() -> Moment:
    """A node is drained: a replacement is placed elsewhere first, and the old one goes when that serves."""
    state = served(fleet({"n1": inventory(), "n2": inventory()}, spec("m")), 10.0)
    return Moment(drain_node(state, "n1", 600.0, 20.0), 20.0)


def drain_without_room_elsewhere() -> Moment:
    """What runs on a draining node fits nowhere else: it stays until the deadline."""
    state = served(fleet({"n1": inventory(), "n2": inventory(memory=GIB // 2)}, spec("m")), 10.0)
    return Moment(drain_node(state, "n1", 600.0, 20.0), 30.0)


def deadline_of_a_drain() -> Moment:
    """The drain's deadline has come and the replica could not be moved: it is drained all the same."""
    state = served(fleet({"n1": inventory(), "n2": inventory(memory=GIB // 2)}, spec("m")), 10.0)
    state = planned(drain_node(state, "n1", 600.0, 20.0), 30.0)
    return Moment(busy(state, 619.0, m_0=2), 620.0)


def drained_is_stopped() -> Moment:
    """A drained replica holds its memory until it is stopped."""
    state = served(drain_node(served(fleet(ROOMY, spec("m")), 10.0), "n1", 600.0, 20.0), 20.0)
    state = planned(state, 22.0)
    return Moment(told(state, "m-0", ReplicaState.DRAINED, 25.0), 25.0)

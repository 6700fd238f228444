"""The steps by which a situation comes about: a pass, starts that succeed or fail, loads, nodes that go."""

from typing import NamedTuple

from fleet.commits import commit
from fleet.facts import Load, ReplicaEvent, loaded, replica_changed
from fleet.planning import plan
from fleet.reasons import Failure, Reason
from fleet.spec import ModelSpec
from fleet.state import CPU, Device, FleetState, Inventory, ReplicaState
from fleet.wishes import apply
from tests.fleets import GIB, fleet, inventory, spec


class Moment(NamedTuple):
    """A fleet, and the time at which it is planned for: seconds since its own beginning."""

    state: FleetState
    now: float


def planned(state: FleetState, now: float) -> FleetState:
    """One pass."""
    return commit(state, plan(state, now), now)


def told(state: FleetState, replica: str, news: ReplicaState | None, now: float) -> FleetState:
    """A replica's workflow tells where it is."""
    generation = state.replicas[replica].generation
    event = ReplicaEvent(replica=replica, generation=generation, state=news, endpoint=f"http://{replica}")
    return replica_changed(state, event, now)


def broke(state: FleetState, replica: str, reason: Reason, detail: str, now: float) -> FleetState:
    """A replica failed."""
    record = state.replicas[replica]
    failure = Failure(reason=reason, detail=detail, node=record.nodes[0])
    event = ReplicaEvent(replica=replica, generation=record.generation, state=ReplicaState.FAILED, failure=failure)
    return replica_changed(state, event, now)


def served(state: FleetState, now: float) -> FleetState:
    """One pass, and everything it started serves a second later."""
    state = planned(state, now)
    for replica in list(state.replicas.values()):
        if replica.state is ReplicaState.PLACED:
            state = told(state, replica.id, ReplicaState.SERVING, now + 1)
    return state


def wanted(state: FleetState, *specs: ModelSpec, now: float) -> FleetState:
    """These specs are applied."""
    for one in specs:
        state, _ = apply(state, one, now)
    return state


def busy(state: FleetState, now: float, **in_flight: int) -> FleetState:
    """Nodes tell what their replicas work on; `m_0` is the replica m-0."""
    for name, count in in_flight.items():
        replica = state.replicas[name.replace("_", "-")]
        load = Load(replica=replica.id, generation=replica.generation, in_flight=count)
        state = loaded(state, replica.nodes[0], "i1", (load,), now)
    return state


def cards(*devices: Device) -> Inventory:
    """A node with these GPUs and 64 GiB of RAM."""
    return inventory(devices=(Device(uuid=CPU, total=64 * GIB), *devices))


def gpu(number: int, model: str, gib: int, *, foreign: int = 0, holders: tuple[int, ...] = ()) -> Device:
    """One GPU; `foreign` is GiB that pids `holders` hold."""
    return Device(uuid=f"GPU-{number}", model=model, total=gib * GIB, foreign=foreign * GIB, holders=holders)


__all__ = [
    "GIB",
    "Moment",
    "broke",
    "busy",
    "cards",
    "fleet",
    "gpu",
    "inventory",
    "planned",
    "served",
    "spec",
    "told",
    "wanted",
]

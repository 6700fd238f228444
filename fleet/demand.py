"""How many replicas a model should have now: what the operator said, or what its requests ask for."""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from fleet.state import ModelRecord, ReplicaRecord, ReplicaState

DOWN_MARGIN = 0.8
"""Fewer replicas only when what is left would be at most this full: a load at the edge must not swing the number."""

SMOOTHING_S = 15.0
"""Time constant of a replica's smoothed load: a burst of seconds starts no engine that takes a minute to load."""


PAST_S = 0.1
"""A look at the load is due this long after it crosses a bound: at the bound itself nothing has changed yet."""

LOADS_GAP_S = 5.0
"""Between two reports of one node's loads, at least: smoothed over 15 s, finer steps say nothing more."""
LOADS_A_SECOND = 50
"""Reports of all nodes together, at most, if the loads of all change all the time. Fleet takes some 500 signals a
second, but to cut its history it needs a moment in which none arrives, and finds none at 200."""

LOADED = (ReplicaState.SERVING, ReplicaState.DRAINING)
"""States whose load counts: what one that goes works on is asked for all the same."""


class Target(NamedTuple):
    """A number of replicas, and why."""

    replicas: int
    reason: str


def target(model: ModelRecord, replicas: Collection[ReplicaRecord], now: float, ended: Collection[str] = ()) -> Target:
    """The wanted number; `replicas` are the model's own, and `ended` those that a plan under way has ended."""
    spec = model.spec
    if spec.scaling is None:
        return Target(spec.replicas, f"wanted {spec.replicas}")
    scaling = spec.scaling
    current = model.scaled if model.scaled is not None else min(max(spec.replicas, scaling.min), scaling.max)
    used = max(model.used_at, model.applied_at)
    # One that starts is not idle: whoever asked for it waits, and it has not had a request only because it cannot.
    starting = any(
        replica.state in (ReplicaState.PLACED, ReplicaState.STARTING) and replica.id not in ended
        for replica in replicas
    )
    if scaling.min == 0 and not starting and not busy(replicas) and now - used >= scaling.idle_after_s:
        return Target(0, f"no request for {scaling.idle_after_s:g} s")
    if current == 0 and model.used_at <= model.scaled_at:
        return Target(0, "nobody asks for it")
    load = sum(load_at(replica, now) for replica in replicas if replica.state in LOADED)
    asked = min(max(math.ceil(load / scaling.target_in_flight), scaling.min, 1), scaling.max)
    reason = f"{load:.1f} in flight, {scaling.target_in_flight:g} a replica" if current else "a request came"
    if asked > current:
        return Target(asked, reason)
    room = scaling.target_in_flight * (current - 1) * DOWN_MARGIN
    if asked < current and load <= room and now - model.scaled_at >= scaling.cooldown_s:
        return Target(asked, reason)
    return Target(min(max(current, scaling.min), scaling.max), reason)


def loads_gap_s(nodes: int) -> float:
    """How long a node of so many waits between two reports of its loads, in seconds."""
    return max(LOADS_GAP_S, nodes / LOADS_A_SECOND)


def busy(replicas: Iterable[ReplicaRecord]) -> bool:
    """Whether one of them works on a request, however old that is; what failed works on nothing."""
    return any(replica.in_flight for replica in replicas if replica.state in LOADED)


def moments(model: ModelRecord, replicas: Collection[ReplicaRecord]) -> Iterable[float]:
    """When time alone may change the target; `replicas` are the model's own."""
    scaling = model.spec.scaling
    if scaling is None:
        return
    yield model.scaled_at + scaling.cooldown_s
    if scaling.min == 0 and model.scaled != 0:
        yield max(model.used_at, model.applied_at) + scaling.idle_after_s
    loaded = [replica for replica in replicas if replica.state in LOADED and replica.loaded_at]
    if loaded and model.scaled:
        start = max(replica.loaded_at for replica in loaded)
        load = sum(load_at(replica, start) for replica in loaded)
        goal = float(sum(replica.in_flight for replica in loaded))
        for bound in (model.scaled, (model.scaled - 1) * DOWN_MARGIN):
            # All loads move towards what is in flight with the same time constant, so their sum does too.
            left = bound * scaling.target_in_flight - goal
            if left and (load - goal) / left > 1:
                yield start + SMOOTHING_S * math.log((load - goal) / left) + PAST_S


def load_at(replica: ReplicaRecord, now: float) -> float:
    """A replica's smoothed load: since its last report it has worked on what that said."""
    return replica.in_flight + (replica.load - replica.in_flight) * math.exp(
        -max(0.0, now - replica.loaded_at) / SMOOTHING_S
    )

"""How many replicas a model should have now: what the operator said, or what its requests ask for."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from fleet.state import ModelRecord, ReplicaRecord, ReplicaState

DOWN_MARGIN = 0.8
"""Fewer replicas only when what is left would be at most this full: a load at the edge must not swing the number."""

SMOOTHING_S = 15.0
"""Time constant of a replica's smoothed load: a burst of seconds starts no engine that takes a minute to load."""


class Target(NamedTuple):
    """A number of replicas, and why."""

    replicas: int
    reason: str


def target(model: ModelRecord, replicas: Iterable[ReplicaRecord], now: float) -> Target:
    """The wanted number; `replicas` are the model's own."""
    spec = model.spec
    if spec.scaling is None:
        return Target(spec.replicas, f"wanted {spec.replicas}")
    scaling = spec.scaling
    current = model.scaled if model.scaled is not None else min(max(spec.replicas, scaling.min), scaling.max)
    used = max(model.used_at, model.applied_at)
    if scaling.min == 0 and now - used >= scaling.idle_after_s:
        return Target(0, f"no request for {scaling.idle_after_s:g} s")
    if current == 0:
        return Target(1, "a request came") if model.used_at > model.scaled_at else Target(0, "nobody asks for it")
    load = sum(replica.load for replica in replicas if replica.state is ReplicaState.SERVING)
    asked = min(max(math.ceil(load / scaling.target_in_flight), scaling.min, 1), scaling.max)
    reason = f"{load:.1f} in flight, {scaling.target_in_flight:g} a replica"
    if asked > current:
        return Target(asked, reason)
    room = scaling.target_in_flight * (current - 1) * DOWN_MARGIN
    if asked < current and load <= room and now - model.scaled_at >= scaling.cooldown_s:
        return Target(asked, reason)
    return Target(min(max(current, scaling.min), scaling.max), reason)


def moments(model: ModelRecord) -> Iterable[float]:
    """When time alone may change the target."""
    scaling = model.spec.scaling
    if scaling is None:
        return
    yield model.scaled_at + scaling.cooldown_s
    if scaling.min == 0 and model.scaled != 0:
        yield max(model.used_at, model.applied_at) + scaling.idle_after_s


def smoothed(load: float, in_flight: int, seconds: float) -> float:
    """The next smoothed load, `seconds` after the last one."""
    return in_flight + (load - in_flight) * math.exp(-max(0.0, seconds) / SMOOTHING_S)

"""Room for what does not fit: what is going anyway, a model's own old version, idle models, lower priorities.

Whatever is ended, is ended only if the replica then fits; and the room it gives is kept for that replica.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fleet.demand import PAST_S, busy, load_at
from fleet.draft import CAN_GO, GOING_STATES, Draft
from fleet.placement import Candidates, place
from fleet.render import size
from fleet.room import Room
from fleet.state import Decision, ModelRecord, NodeRecord, ReplicaRecord, ReplicaState
from fleet.steps import StepKind

EVICT_IDLE_S = 60.0
"""A model is idle after so long without a request: shorter, and a pause between two questions costs a reload."""


class Freed(NamedTuple):
    """A room in which it fits, and whom that costs."""

    decision: Decision
    victims: tuple[ReplicaRecord, ...]


def make_room(draft: Draft, model: ModelRecord, replica: str) -> None:
    """Add the steps that make room for one replica that was refused, if there is a way."""
    if not may_find_room(draft, model):
        return  # the most common case by far: it waits, as it did before
    going = _going(draft)
    ahead = _without(draft, going)
    asked = Candidates(model.spec, ahead, draft.standings)
    decision = place(model.spec, replica, ahead, asked)
    if not decision.shards:
        freed = (
            _recreate(draft, model, replica, ahead)
            or _evict(draft, model, replica, ahead)
            or _preempt(draft, model, replica, ahead, asked)
        )
        if freed is None:
            return
        decision = freed.decision
    draft.promise(model, decision.shards)


def idle_moments(models: Iterable[ModelRecord], replicas: dict[str, list[ReplicaRecord]]) -> Iterator[float]:
    """When a model becomes idle enough to be evicted for another that waits; `replicas` by model."""
    for model in models:
        held = [other for other in replicas.get(model.spec.id, ()) if other.state in CAN_GO]
        since = _served_since(held)
        if held and since is not None and model.spec.scaling is not None and model.spec.scaling.min == 0:
            yield max(model.used_at, model.applied_at, since) + EVICT_IDLE_S + PAST_S


def may_find_room(draft: Draft, model: ModelRecord) -> bool:
    """Whether anything goes, or may be ended for it; False means that it waits for others."""
    return (
        bool(_going(draft))
        or model.spec.rollout.recreate
        or any(other.spec.priority < model.spec.priority for other in draft.models if draft.replicas[other.spec.id])
        or bool(_idle(draft, model))
    )


def _going(draft: Draft) -> list[ReplicaRecord]:
    return [
        other
        for others in draft.replicas.values()
        for other in others
        if other.state in GOING_STATES or (other.id in draft.ended and other.state in CAN_GO)
    ]


def _without(draft: Draft, going: list[ReplicaRecord]) -> Room:
    """The room as it will be: the nodes' own, less what stays and what this plan has placed."""
    room = draft.room.copy()
    for other in going:
        room.left(other.model, other.shards)
    return room


def _recreate(draft: Draft, model: ModelRecord, replica: str, ahead: Room) -> Freed | None:
    """The model's own older versions, where its rollout allows to stop them first."""
    if not model.spec.rollout.recreate:
        return None
    old = [other for other in _standing(draft, model) if other.spec_version != model.spec_version]
    old.sort(key=lambda other: (load_at(other, draft.now), other.id))
    room = ahead.copy()
    for count, victim in enumerate(old, start=1):
        room.give(victim.model, victim.shards)
        decision = place(model.spec, replica, room)
        if decision.shards:
            victims = tuple(old[:count])
            for gone in victims:
                reason = f"version {model.spec_version} has no room beside it, and its rollout may recreate"
                draft.end(StepKind.DRAIN, gone, reason)
            return Freed(decision, victims)
    return None


def _evict(draft: Draft, model: ModelRecord, replica: str, ahead: Room) -> Freed | None:
    """Idle models that may go to zero, the least recently used first."""
    idle = _idle(draft, model)
    if not idle:
        return None
    chosen: list[ModelRecord] = []
    room = ahead.copy()
    asked = Candidates(model.spec, room, draft.standings)
    for other in idle:
        held = _standing(draft, other)
        if not held:
            continue
        chosen.append(other)
        for victim in held:
            room.give(victim.model, victim.shards)
        if asked.winners():
            break
    else:
        return None
    for other in list(chosen):  # whoever is not needed after all stays
        held = _standing(draft, other)
        for victim in held:
            room.take(victim.model, victim.shards)
        if asked.winners():
            chosen.remove(other)
            continue
        for victim in held:
            room.give(victim.model, victim.shards)
    victims = tuple(victim for other in chosen for victim in _standing(draft, other))
    for other in chosen:
        draft.to_zero(other)
    for victim in victims:
        draft.end(StepKind.EVICT, victim, f"idle, and {model.spec.name} needs the room: {_frees(victim)}")
    return Freed(place(model.spec, replica, room, asked), victims)


def _idle(draft: Draft, model: ModelRecord) -> list[ModelRecord]:
    return sorted(
        (
            other
            for other in draft.models
            if other.spec.scaling is not None
            and other.spec.scaling.min == 0
            and other.spec.id != model.spec.id
            and other.spec.id not in draft.placing
            and other.spec.id not in draft.promises  # it is to have more, not less
            and not other.removing
            and other.spec.priority <= model.spec.priority
            and draft.now - _idle_since(draft, other) >= EVICT_IDLE_S
        ),
        key=lambda other: (_idle_since(draft, other), other.spec.id),
    )


def _idle_since(draft: Draft, model: ModelRecord) -> float:
    """When it last had something to do; a start under way, or just done, is something, but none that this plan ends."""
    replicas = draft.replicas[model.spec.id]
    since = _served_since(other for other in replicas if other.id not in draft.ended)
    return draft.now if since is None or busy(replicas) else max(model.used_at, model.applied_at, since)


def _served_since(replicas: Iterable[ReplicaRecord]) -> float | None:
    """When the last of them began to serve; None where one is still on its way."""
    held = [other for other in replicas if other.state in CAN_GO]
    if any(other.state is not ReplicaState.SERVING for other in held):
        return None
    return max((other.since for other in held), default=0.0)


def _standing(draft: Draft, model: ModelRecord) -> list[ReplicaRecord]:
    return [other for other in draft.replicas[model.spec.id] if other.state in CAN_GO and other.id not in draft.acted]


def _preempt(draft: Draft, model: ModelRecord, replica: str, ahead: Room, asked: Candidates) -> Freed | None:
    """The nodes on which the fewest and cheapest replicas of strictly lower priority must go."""
    lower: dict[str, list[ReplicaRecord]] = {}
    for other in draft.models:
        if other.spec.priority < model.spec.priority:
            for victim in _standing(draft, other):
                for node in victim.nodes:
                    lower.setdefault(node, []).append(victim)
    if not lower:
        return None
    costs = [
        (_cost(draft, victims), node, victims)
        for index, node in enumerate(ahead.nodes)
        if asked.could_fit(index)
        and (victims := _for_node(draft, index, ahead, asked, lower.get(node.id, []))) is not None
    ]
    label = model.spec.constraints.interconnect if model.spec.shards > 1 else ""
    groups: dict[str, list[tuple[tuple[float, ...], NodeRecord, tuple[ReplicaRecord, ...]]]] = {}
    for entry in costs:
        groups.setdefault(entry[1].inventory.labels.get(label, "") if label else "", []).append(entry)
    best: tuple[ReplicaRecord, ...] | None = None
    for _, group in sorted(groups.items()):
        top = sorted(group, key=lambda entry: (entry[0], entry[1].id))[: model.spec.shards]
        if len(top) < model.spec.shards:
            continue
        victims = tuple({victim.id: victim for entry in top for victim in entry[2]}.values())
        if best is None or _cost(draft, victims) < _cost(draft, best):
            best = victims
    if not best:
        return None
    room = ahead.copy()
    for victim in best:
        room.give(victim.model, victim.shards)
    decision = place(model.spec, replica, room)
    if not decision.shards:
        return None
    for victim in best:
        priority = draft.state.models[victim.model].spec.priority
        reason = f"{model.spec.name} is more important ({model.spec.priority} against {priority}): {_frees(victim)}"
        draft.end(StepKind.PREEMPT, victim, reason)
    return Freed(decision, best)


def _for_node(
    draft: Draft, index: int, ahead: Room, asked: Candidates, lower: list[ReplicaRecord]
) -> tuple[ReplicaRecord, ...] | None:
    """The victims that must go from one node for one shard; () where it fits as it is, None where nothing helps.

    `ahead` is as before when this returns: a copy of it for each node would cost the square of their number.
    """
    gone: list[ReplicaRecord] = []
    waiting = iter(sorted(lower, key=lambda victim: _cost(draft, (victim,))))
    while not asked.fits(index) and (victim := next(waiting, None)) is not None:
        ahead.give(victim.model, victim.shards)
        gone.append(victim)
    fits = asked.fits(index)
    for victim in gone[:-1] if fits else ():  # whoever is not needed after all stays
        ahead.take(victim.model, victim.shards)
        if asked.fits(index):
            gone.remove(victim)
        else:
            ahead.give(victim.model, victim.shards)
    for victim in gone:
        ahead.take(victim.model, victim.shards)
    return tuple(gone) if fits else None


def _cost(draft: Draft, victims: tuple[ReplicaRecord, ...]) -> tuple[float, ...]:
    """How much it hurts: how many, how important, how many of them serve, what they work on, how large they are.

    Whole requests: beneath that a load is noise, and the smaller victim is sooner back elsewhere.
    """
    return (
        len(victims),
        sum(draft.state.models[victim.model].spec.priority for victim in victims),
        sum(victim.state is ReplicaState.SERVING for victim in victims),
        round(sum(load_at(victim, draft.now) for victim in victims)),
        sum(_memory(victim) for victim in victims),
    )


def _frees(victim: ReplicaRecord) -> str:
    return f"frees {size(_memory(victim))} on {', '.join(victim.nodes)}"


def _memory(victim: ReplicaRecord) -> int:
    return sum(share.memory for shard in victim.shards for share in shard.devices)

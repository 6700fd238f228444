"""Room for what does not fit: first what is going anyway, then idle models, then strictly lower priorities.

Whatever is ended, is ended only if the replica then fits; and the room it gives is kept for that replica.
"""

from typing import NamedTuple

from fleet.draft import GOING_STATES, Draft
from fleet.placement import CLOSED, judge, place
from fleet.render import size
from fleet.room import Room
from fleet.state import Decision, ModelRecord, NodeRecord, Outcome, ReplicaRecord, ReplicaState
from fleet.steps import StepKind

EVICT_IDLE_S = 60.0
"""A model is idle after so long without a request: shorter, and a pause between two questions costs a reload."""

CAN_GO = frozenset({ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.SERVING})


class Freed(NamedTuple):
    """A room in which it fits, and whom that costs."""

    decision: Decision
    victims: tuple[ReplicaRecord, ...]


def make_room(draft: Draft, model: ModelRecord, replica: str) -> None:
    """Add the steps that make room for one replica that was refused, if there is a way."""
    going = [
        other
        for others in draft.replicas.values()
        for other in others
        if other.state in GOING_STATES or (other.id in draft.ended and other.state in CAN_GO)
    ]
    ahead = _without(draft, going)
    decision = place(model.spec, replica, ahead)
    if not decision.shards:
        freed = _evict(draft, model, replica, ahead) or _preempt(draft, model, replica, ahead)
        if freed is None:
            return
        decision = freed.decision
    # Kept for it: what is less important and comes later in this pass must not take it.
    draft.room.take(model.spec.id, decision.shards)


def _without(draft: Draft, going: list[ReplicaRecord]) -> Room:
    """The room as it will be: the nodes' own, less what stays and what this plan has placed."""
    room = draft.room.copy()
    for other in going:
        room.give(other.model, other.shards)
    return room


def _evict(draft: Draft, model: ModelRecord, replica: str, ahead: Room) -> Freed | None:
    """Idle models that may go to zero, the least recently used first."""
    idle = sorted(
        (
            other
            for other in draft.models
            if other.spec.id != model.spec.id
            and not other.removing
            and other.spec.scaling is not None
            and other.spec.scaling.min == 0
            and other.spec.priority <= model.spec.priority
            and draft.now - max(other.used_at, other.applied_at) >= EVICT_IDLE_S
        ),
        key=lambda other: (max(other.used_at, other.applied_at), other.spec.id),
    )
    chosen: list[ModelRecord] = []
    room = ahead.copy()
    for other in idle:
        held = _standing(draft, other)
        if not held:
            continue
        chosen.append(other)
        for victim in held:
            room.give(victim.model, victim.shards)
        if place(model.spec, replica, room).shards:
            break
    else:
        return None
    for other in list(chosen):  # whoever is not needed after all stays
        trial = room.copy()
        for victim in _standing(draft, other):
            trial.take(victim.model, victim.shards)
        if place(model.spec, replica, trial).shards:
            chosen.remove(other)
            room = trial
    victims = tuple(victim for other in chosen for victim in _standing(draft, other))
    for other in chosen:
        draft.scale(other, 0)
    for victim in victims:
        draft.end(StepKind.EVICT, victim, f"idle, and {model.spec.name} needs the room: {_frees(victim)}")
    return Freed(place(model.spec, replica, room), victims)


def _standing(draft: Draft, model: ModelRecord) -> list[ReplicaRecord]:
    return [other for other in draft.replicas[model.spec.id] if other.state in CAN_GO and other.id not in draft.acted]


def _preempt(draft: Draft, model: ModelRecord, replica: str, ahead: Room) -> Freed | None:
    """The nodes on which the fewest and cheapest replicas of strictly lower priority must go."""
    lower: dict[str, list[ReplicaRecord]] = {}
    for other in draft.models:
        if other.spec.priority < model.spec.priority:
            for victim in _standing(draft, other):
                for node in victim.nodes:
                    lower.setdefault(node, []).append(victim)
    costs = [
        (_cost(draft, victims), node, victims)
        for node in ahead.nodes
        if node.state not in CLOSED
        and (victims := _for_node(draft, node, model, ahead, lower.get(node.id, []))) is not None
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
    draft: Draft, node: NodeRecord, model: ModelRecord, ahead: Room, lower: list[ReplicaRecord]
) -> tuple[ReplicaRecord, ...] | None:
    """The victims that must go from one node for one shard; () where it fits as it is, None where nothing helps."""
    if judge(node, model.spec, ahead).verdict.outcome is Outcome.FITS:
        return ()
    room, chosen = ahead.copy(), list[ReplicaRecord]()
    for victim in sorted(lower, key=lambda victim: _cost(draft, (victim,))):
        chosen.append(victim)
        room.give(victim.model, victim.shards)
        if judge(node, model.spec, room).verdict.outcome is Outcome.FITS:
            break
    else:
        return None
    for victim in chosen[:-1]:
        room.take(victim.model, victim.shards)
        if judge(node, model.spec, room).verdict.outcome is Outcome.FITS:
            chosen.remove(victim)
        else:
            room.give(victim.model, victim.shards)
    return tuple(chosen)


def _cost(draft: Draft, victims: tuple[ReplicaRecord, ...]) -> tuple[float, ...]:
    """How much it hurts: how many, how important, how many of them serve, what they work on."""
    return (
        len(victims),
        sum(draft.state.models[victim.model].spec.priority for victim in victims),
        sum(victim.state is ReplicaState.SERVING for victim in victims),
        sum(victim.load for victim in victims),
    )


def _frees(victim: ReplicaRecord) -> str:
    memory = sum(share.memory for shard in victim.shards for share in shard.devices)
    return f"frees {size(memory)} on {', '.join(victim.nodes)}"

"""Why a model is where it is, and what would change that: the last placement, the one it would get now, the ways out.

A way out is tried on a copy of the node before it is said: what is named here is enough.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fleet.placement import CLOSED, judge, place
from fleet.reasons import REASONS, Failure, Reason
from fleet.records import Record
from fleet.render import size
from fleet.room import Room, room_of
from fleet.spec import ModelSpec
from fleet.standing import given_up
from fleet.state import (
    HOLDING,
    Decision,
    Device,
    EngineOffer,
    FleetState,
    ModelRecord,
    NodeRecord,
    NodeState,
    Outcome,
    ReplicaRecord,
    Verdict,
)

ACTS = 8
"""Acts on one node before it is left alone: there are as many kinds of them, and each is needed once."""


class WayOut(Record):
    """What would make one node take one shard."""

    node: str
    acts: tuple[str, ...]
    """Each in words, all of them needed."""
    stops: tuple[str, ...] = ()
    """Replicas that would have to end for it."""

    @property
    def sentence(self) -> str:
        """All acts in one line."""
        return ", and ".join(self.acts)


class Explanation(Record):
    """`ctl model explain --json`."""

    model: str
    """The name clients use."""
    waiting: str
    """Why a replica waits for a place; empty where none waits."""
    failure: Failure | None
    """Why a replica was given up."""
    last: Decision | None
    """The last placement; None before the first."""
    now: Decision
    """Where one more replica would go just now."""
    more: int
    """Nodes that must fit beside those that do: 1, or for a gang as many as it lacks; 0 where it fits."""
    ways: tuple[WayOut, ...]
    """What would make further nodes fit, the least first; empty where it fits."""
    advice: tuple[str, ...]
    """What else to do where there is no way out on a node."""


class World(NamedTuple):
    """One node as it might be, with what holds memory there."""

    node: NodeRecord
    replicas: tuple[ReplicaRecord, ...]

    def verdict(self, spec: ModelSpec) -> Verdict:
        """Its answer."""
        return judge(self.node, spec, Room((self.node,), self.replicas)).verdict


class Act(NamedTuple):
    """One change, in words, and the node after it."""

    words: str
    world: World
    stops: tuple[ReplicaRecord, ...] = ()


def explain(state: FleetState, model: ModelRecord) -> Explanation:
    """The whole answer for one model."""
    decision = place(model.spec, _next_replica(state, model), room_of(state))
    ways = ways_out(state, model.spec, decision)
    return Explanation(
        model=model.spec.name,
        waiting=model.waiting,
        failure=given_up(state, model),
        last=model.decision,
        now=decision,
        more=0 if decision.shards else max(1, model.spec.shards - _fitting(decision)),
        ways=ways,
        advice=() if ways or decision.shards else _advice(model.spec, decision),
    )


def ways_out(state: FleetState, spec: ModelSpec, decision: Decision) -> tuple[WayOut, ...]:
    """For each node that does not fit what would make it fit, the least first; nothing where the decision fits."""
    if decision.shards:
        return ()
    held: dict[str, list[ReplicaRecord]] = {}
    for replica in state.replicas.values():
        for name in set(replica.nodes) if replica.state in HOLDING else ():
            held.setdefault(name, []).append(replica)
    found = []
    for node in sorted(state.nodes.values(), key=lambda node: node.id):
        acts = _acts(state, spec, World(node, tuple(held.get(node.id, ()))))
        if acts:
            found.append((_cost(state, acts), _way(node, acts)))
    return tuple(way for _, way in sorted(found, key=lambda entry: entry[0]))


def _next_replica(state: FleetState, model: ModelRecord) -> str:
    """The one that waits to be started again, else the next new one."""
    failed = [r.id for r in state.replicas.values() if r.model == model.spec.id and r.state not in HOLDING]
    return min(failed, default=f"{model.spec.id}-{model.next_ordinal}")


def _fitting(decision: Decision) -> int:
    return sum(verdict.reason is Reason.GANG_INCOMPLETE for verdict in decision.verdicts)


def _way(node: NodeRecord, acts: list[Act]) -> WayOut:
    stops = tuple(replica.id for act in acts for replica in act.stops)
    return WayOut(node=node.id, acts=tuple(act.words for act in acts), stops=stops)


def _cost(state: FleetState, acts: list[Act]) -> tuple[float, ...]:
    """Replicas that end hurt most, the less important ones less; then the number of acts."""
    victims = [replica for act in acts for replica in act.stops]
    return (len(victims), sum(_priority(state, replica) for replica in victims), len(acts))


def _acts(state: FleetState, spec: ModelSpec, world: World) -> list[Act]:
    """What makes the node fit, step by step; empty where it fits already or nothing helps."""
    done: list[Act] = []
    while len(done) < ACTS:
        verdict = world.verdict(spec)
        if verdict.outcome is Outcome.FITS:
            return done
        act = _act(state, spec, world, verdict)
        if act is None:
            return []
        done.append(act)
        world = act.world
    return []


def _act(state: FleetState, spec: ModelSpec, world: World, verdict: Verdict) -> Act | None:
    """What removes the one reason the node gives."""
    node, inventory, constraints = world.node, world.node.inventory, spec.constraints
    match verdict.reason:
        case Reason.NODE_CORDONED | Reason.NODE_DRAINING:
            return Act(f"uncordon {node.id}", _opened(world))
        case Reason.NODE_QUARANTINED:
            freed = _with(world, quarantine="")
            return Act(f"free {node.id} of what keeps it in quarantine ({node.quarantine}), or uncordon it", freed)
        case Reason.NODE_LOST:
            return Act(f"bring the agent of {node.id} back", _opened(world))
        case Reason.ENGINE_MISSING:
            offer = EngineOffer(engine=spec.engine, version="", installed=False)
            return Act(
                f"add {spec.engine} to {node.id}'s agent.yaml", _with(world, engines=(*inventory.engines, offer))
            )
        case Reason.LABELS:
            return _label(spec, world)
        case Reason.ROLE:
            words = f"give {node.id} the role {constraints.role} in its agent.yaml"
            return Act(words, _with(world, roles=(*inventory.roles, constraints.role)))
        case Reason.REMOTE_CODE:
            words = f"allow trust_remote_code in {node.id}'s agent.yaml"
            return Act(words, _with(world, trust_remote_code=True))
        case Reason.DISK:
            return _disk(spec, world)
        case Reason.GPU_MEMORY | Reason.MEMORY:
            return _memory(state, spec, world, verdict)
        case _:
            return None  # no act of ours gives a node other GPUs


def _opened(world: World) -> World:
    return World(world.node.model_copy(update={"state": NodeState.READY}), world.replicas)


def _with(world: World, **inventory: object) -> World:
    changed = world.node.inventory.model_copy(update=inventory)
    return World(world.node.model_copy(update={"inventory": changed}), world.replicas)


def _label(spec: ModelSpec, world: World) -> Act | None:
    labels, wanted = world.node.inventory.labels, spec.constraints.labels
    absent = {key: value for key, value in wanted.items() if labels.get(key) != value}
    if not absent:
        return None  # a gang's interconnect: which value it has is not ours to say
    words = ", ".join(f"{key}={value}" for key, value in sorted(absent.items()))
    return Act(f"label {world.node.id} {words} in its agent.yaml", _with(world, labels={**labels, **wanted}))


def _disk(spec: ModelSpec, world: World) -> Act:
    """What lacks beside the weights that are on their way to the node already."""
    node = world.node
    room = Room((node,), world.replicas)
    free = room.disk(node.id, spec.weights.model_id) or 0
    lacking = spec.need.disk - free
    kept = room.disk_kept(node.id)
    words = f"free {size(lacking)} of disk on {node.id}"
    if kept:
        words = f"{words}, which keeps {size(kept)} for weights that are on their way"
    return Act(words, _with(world, disk_free=node.inventory.disk_free + lacking))


def _memory(state: FleetState, spec: ModelSpec, world: World, verdict: Verdict) -> Act | None:
    """What others hold first, then replicas, then both; None where the node is too small for it."""
    lacks = f"{world.node.id} lacks {size(verdict.need - verdict.free)}"
    alone = _without_foreign(world)
    if alone is not world and _has_room(alone, spec):
        return Act(f"{lacks}: {_end_others(verdict)}", alone)
    victims = _victims(state, spec, world)
    if victims:
        return _stopping(state, lacks, world, victims)
    victims = _victims(state, spec, alone) if alone is not world else ()
    if not victims:
        return None
    act = _stopping(state, lacks, alone, victims)
    return act._replace(words=f"{act.words}, and {_end_others(verdict)}")


def _end_others(verdict: Verdict) -> str:
    who = f"pid {verdict.holder} and others" if verdict.holder else "processes that are not llmgw's"
    return f"end {who}, which hold {size(verdict.foreign)}" if verdict.foreign else f"end {who}"


def _without_foreign(world: World) -> World:
    devices = world.node.inventory.devices
    if not any(device.foreign for device in devices):
        return world
    freed: tuple[Device, ...] = tuple(device.model_copy(update={"foreign": 0, "holders": ()}) for device in devices)
    return _with(world, devices=freed)


def _has_room(world: World, spec: ModelSpec) -> bool:
    return world.verdict(spec).outcome is Outcome.FITS


def _victims(state: FleetState, spec: ModelSpec, world: World) -> tuple[ReplicaRecord, ...]:
    """The replicas of other models that would have to end, the least important first; () where that is no help."""
    others = sorted(
        (replica for replica in world.replicas if replica.model != spec.id),
        key=lambda replica: (_priority(state, replica), replica.load, replica.id),
    )
    chosen: list[ReplicaRecord] = []
    for replica in others:
        chosen.append(replica)
        if _has_room(_less(world, chosen), spec):
            break
    else:
        return ()
    for replica in list(chosen):  # whoever is not needed after all stays
        fewer = [other for other in chosen if other is not replica]
        if fewer and _has_room(_less(world, fewer), spec):
            chosen = fewer
    return tuple(chosen)


def _less(world: World, ended: Iterable[ReplicaRecord]) -> World:
    gone = {replica.id for replica in ended}
    return World(world.node, tuple(replica for replica in world.replicas if replica.id not in gone))


def _stopping(state: FleetState, lacks: str, world: World, victims: tuple[ReplicaRecord, ...]) -> Act:
    words = ", ".join(
        f"{replica.id} (priority {_priority(state, replica)}, {size(_held(replica, world.node.id))})"
        for replica in victims
    )
    return Act(f"{lacks}: stop {words}", _less(world, victims), victims)


def _held(replica: ReplicaRecord, node: str) -> int:
    return sum(share.memory for shard in replica.shards if shard.node == node for share in shard.devices)


def _priority(state: FleetState, replica: ReplicaRecord) -> int:
    model = state.models.get(replica.model)
    return model.spec.priority if model is not None else 0


def _advice(spec: ModelSpec, decision: Decision) -> tuple[str, ...]:
    if not decision.verdicts:
        return ("start an agent: no node has joined",)
    reasons = {verdict.reason for verdict in decision.verdicts} - {None, Reason.NODE_QUARANTINED, *CLOSED.values()}
    advice = [meaning.advice for reason, meaning in REASONS.items() if reason in reasons]
    short = [v for v in decision.verdicts if v.reason in (Reason.MEMORY, Reason.GPU_MEMORY)]
    if short:
        largest = max(short, key=lambda verdict: (verdict.capacity, verdict.node))
        if largest.capacity < spec.need.memory:
            advice.append(
                f"no device is large enough: {size(spec.need.memory)} of {size(largest.capacity)} on {largest.node}"
            )
    if not advice:
        advice.append("add a node: those that are closed or lost could not take it either")
    return tuple(dict.fromkeys(advice))

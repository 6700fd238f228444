"""What follows from a state: what is missing, what was given up, what is free, and what must never be."""

from collections import Counter

from fleet.reasons import Failure, Reason
from fleet.room import room_of
from fleet.state import HOLDING, FleetState, ModelRecord, Outcome, ReplicaRecord, ReplicaState

UNDER_WAY = frozenset({ReplicaState.PLACED, ReplicaState.STARTING})
FREEING = frozenset({ReplicaState.DRAINING, ReplicaState.DRAINED, ReplicaState.STOPPING})

COMING = frozenset({ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.FAILED})
"""States in which a replica may serve again without anybody's help, unless it was given up."""


def missing(state: FleetState, model: ModelRecord) -> int:
    """How many more replicas of the current version must serve."""
    serving = sum(
        replica.model == model.spec.id
        and replica.spec_version == model.spec_version
        and replica.state is ReplicaState.SERVING
        for replica in state.replicas.values()
    )
    return max(0, wanted(state, model) - serving)


def superfluous(state: FleetState, model: ModelRecord) -> list[ReplicaRecord]:
    """What still holds memory and is to go, when all that is wanted serves."""
    mine = [replica for replica in state.replicas.values() if replica.model == model.spec.id]
    held = sorted((replica for replica in mine if replica.state in HOLDING), key=lambda replica: replica.id)
    current = [
        replica
        for replica in held
        if replica.spec_version == model.spec_version and replica.state is ReplicaState.SERVING
    ]
    kept = {replica.id for replica in current[: wanted(state, model)]}
    return [replica for replica in held if replica.id not in kept] if len(held) > len(kept) else []


def wanted(state: FleetState, model: ModelRecord) -> int:
    """How many replicas it should have: what the operator said, or what demand made of it last."""
    return model.spec.replicas if model.spec.scaling is None or model.scaled is None else model.scaled


def given_up(state: FleetState, model: ModelRecord) -> Failure | None:
    """The failure that keeps the model from being whole, if one was given up."""
    for replica in state.replicas.values():
        if replica.model == model.spec.id and replica.spec_version == model.spec_version and replica.given_up:
            return replica.failure
    return None


def barred(state: FleetState, model: ModelRecord) -> str:
    """Why no request for this model can bring a replica, as a sentence; empty where one is on its way or may come."""
    name = model.spec.name
    if model.removing:
        return f"{name} is being removed"
    mine = [replica for replica in state.replicas.values() if replica.model == model.spec.id]
    if any(replica.state in COMING and not replica.given_up for replica in mine):
        return ""
    failure = given_up(state, model)
    if failure is not None:
        return f"its start was given up: {failure.told(model=name)}"
    if model.spec.scaling is None and model.spec.replicas == 0:
        return f"0 replicas of {name} are wanted, and it has no scaling by demand"
    return ""


def no_room(state: FleetState, model: ModelRecord) -> Failure | None:
    """Why a model waits that no node has room for; None while something of it starts, or room is being made."""
    if not model.waiting or missing(state, model) == 0:
        return None
    for replica in state.replicas.values():
        mine = replica.model == model.spec.id and replica.spec_version == model.spec_version
        if replica.state in FREEING or (mine and replica.state in UNDER_WAY):
            return None
    verdicts = model.decision.verdicts if model.decision is not None else ()
    refused = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUSED] or list(verdicts)
    common = Counter(verdict.reason for verdict in refused if verdict.reason is not None).most_common(1)
    return Failure(reason=common[0][0] if common else Reason.NO_NODES, detail=model.waiting)


def over_capacity(state: FleetState) -> dict[str, int]:
    """Bytes reserved beyond what a device or disk holds, as `node/uuid` and `node/disk`.

    No plan adds to it. It is not empty only where a node reported less than it had before.
    """
    reserved: dict[tuple[str, str], int] = {}
    for replica in state.replicas.values():
        if replica.state in HOLDING:
            for shard in replica.shards:
                for share in shard.devices:
                    reserved[shard.node, share.uuid] = reserved.get((shard.node, share.uuid), 0) + share.memory
    totals = {
        (node.id, device.uuid): device.total for node in state.nodes.values() for device in node.inventory.devices
    }
    over = {
        f"{node}/{uuid}": taken - totals.get((node, uuid), 0)
        for (node, uuid), taken in reserved.items()
        if taken > totals.get((node, uuid), 0)
    }
    room = room_of(state)
    return over | {
        f"{node.id}/disk": kept - node.inventory.disk_free
        for node in state.nodes.values()
        if (kept := room.disk_kept(node.id)) > node.inventory.disk_free
    }


def oversold(before: FleetState, after: FleetState) -> tuple[str, ...]:
    """Devices and disks on which the later state reserves more beyond what there is than the earlier one."""
    was = over_capacity(before)
    return tuple(sorted(name for name, size in over_capacity(after).items() if size > was.get(name, 0)))

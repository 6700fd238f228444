"""Where a shard goes: every node is asked, every node answers, the best of those that fit wins."""

from collections.abc import Iterable

from fleet.reasons import Reason
from fleet.render import decision_sentence
from fleet.state import (
    CPU,
    HOLDING,
    Decision,
    Device,
    DeviceShare,
    FleetState,
    ModelRecord,
    NodeRecord,
    NodeState,
    Outcome,
    ReplicaRecord,
    ShardAssignment,
    Verdict,
)

SCORE_WEIGHTS = {"spread": 2.0, "weights_local": 1.0, "best_fit": 1.0}
"""Spread counts double: losing one node must not take all copies of a model, and a fetch is paid once."""


class Free:
    """Free bytes per node and device while one plan is made; each placement takes from it."""

    def __init__(self, nodes: Iterable[NodeRecord], replicas: Iterable[ReplicaRecord]) -> None:
        self._free = {node.id: {device.uuid: device.usable for device in node.inventory.devices} for node in nodes}
        self._copies: dict[tuple[str, str], int] = {}
        for replica in replicas:
            if replica.state in HOLDING:
                self.take(replica.model, replica.shards)

    def of(self, node: str, device: str) -> int:
        """Free bytes; below zero where foreign processes grew into what is reserved."""
        return self._free.get(node, {}).get(device, 0)

    def copies(self, model: str, node: str) -> int:
        """Shards of this model that hold memory on this node."""
        return self._copies.get((model, node), 0)

    def take(self, model: str, shards: Iterable[ShardAssignment]) -> None:
        """Reserve."""
        for shard in shards:
            self._copies[model, shard.node] = self.copies(model, shard.node) + 1
            devices = self._free.setdefault(shard.node, {})
            for share in shard.devices:
                devices[share.uuid] = devices.get(share.uuid, 0) - share.memory


def free_of(state: FleetState) -> Free:
    """What is free now."""
    return Free(state.nodes.values(), state.replicas.values())


def place(state: FleetState, model: ModelRecord, replica: str, free: Free) -> Decision:
    """Choose a node for the one shard of `replica`; `free` is read, not changed.

    Returns a decision with a verdict for every node; `shards` is empty where none fits.
    """
    answers = [_judge(node, model, free) for node in sorted(state.nodes.values(), key=lambda node: node.id)]
    verdicts = tuple(verdict for verdict, _ in answers)
    fitting = [(verdict, shares) for verdict, shares in answers if verdict.outcome is Outcome.FITS]
    shards: tuple[ShardAssignment, ...] = ()
    if fitting:
        winner, shares = max(fitting, key=lambda answer: answer[0].score)  # the first of equals: order of node ids
        shards = (ShardAssignment(rank=0, node=winner.node, devices=shares),)
    return Decision(
        model=model.spec.id,
        replica=replica,
        shards=shards,
        verdicts=verdicts,
        sentence=decision_sentence(model.spec.name, shards, verdicts),
    )


def _judge(node: NodeRecord, model: ModelRecord, free: Free) -> tuple[Verdict, tuple[DeviceShare, ...]]:
    need = model.spec.need
    excluded = _excluded(node, model)
    if excluded is not None:
        return Verdict(node=node.id, outcome=Outcome.EXCLUDED, reason=excluded), ()
    local = model.spec.weights.model_id in node.inventory.weights
    if not local and need.disk > node.inventory.disk_free:
        return (
            Verdict(
                node=node.id,
                outcome=Outcome.REFUSED,
                reason=Reason.DISK,
                need=need.disk,
                free=node.inventory.disk_free,
                capacity=node.inventory.disk_total,
            ),
            (),
        )
    devices, reason = _devices(node, need.gpus)
    wanted = max(1, need.gpus)
    by_free = sorted(devices, key=lambda device: (free.of(node.id, device.uuid), device.uuid))
    if len(devices) < wanted:
        counts = {"need": wanted, "free": len(devices), "capacity": len(devices)}
        return Verdict(node=node.id, outcome=Outcome.REFUSED, reason=Reason.GPU_COUNT, **counts), ()
    enough = [device for device in by_free if free.of(node.id, device.uuid) >= need.memory]
    if len(enough) < wanted:
        # The device that decides is the best of those that are still missing.
        short = by_free[-wanted]
        return (
            Verdict(
                node=node.id,
                outcome=Outcome.REFUSED,
                reason=reason,
                need=need.memory,
                free=max(0, free.of(node.id, short.uuid)),
                capacity=short.total,
            ),
            (),
        )
    chosen = enough[:wanted]  # the fullest that still fit, so that large gaps stay for large models
    parts = {
        "spread": 1.0 / (1 + free.copies(model.spec.id, node.id)),
        "weights_local": 1.0 if local else 0.0,
        "best_fit": _best_fit(chosen, need.memory, node.id, free),
    }
    verdict = Verdict(
        node=node.id,
        outcome=Outcome.FITS,
        need=need.memory,
        free=free.of(node.id, chosen[0].uuid),
        capacity=chosen[0].total,
        score=sum(SCORE_WEIGHTS[name] * part for name, part in parts.items()),
        parts=parts,
    )
    return verdict, tuple(DeviceShare(uuid=device.uuid, memory=need.memory) for device in chosen)


def _excluded(node: NodeRecord, model: ModelRecord) -> Reason | None:
    if node.state is NodeState.LOST:
        return Reason.NODE_LOST
    if node.state is NodeState.CORDONED:
        return Reason.NODE_CORDONED
    if all(offer.engine is not model.spec.engine for offer in node.inventory.engines):
        return Reason.ENGINE_MISSING
    return None


def _devices(node: NodeRecord, gpus: int) -> tuple[list[Device], Reason]:
    if gpus == 0:
        return [device for device in node.inventory.devices if device.uuid == CPU], Reason.MEMORY
    return [device for device in node.inventory.devices if device.uuid != CPU], Reason.GPU_MEMORY


def _best_fit(chosen: list[Device], memory: int, node: str, free: Free) -> float:
    left = sum(free.of(node, device.uuid) - memory for device in chosen)
    total = sum(device.total for device in chosen)
    return 1.0 - left / total if total else 0.0

"""Where a replica goes: every node is asked, every node answers, the best of those that fit win."""

from typing import NamedTuple

from fleet.reasons import Reason
from fleet.render import decision_sentence
from fleet.room import Room
from fleet.spec import Constraints, ModelSpec
from fleet.state import (
    CPU,
    Decision,
    Device,
    DeviceShare,
    NodeRecord,
    NodeState,
    Outcome,
    ShardAssignment,
    Verdict,
)

SCORE_WEIGHTS = {"spread": 2.0, "weights_local": 1.0, "best_fit": 1.0, "preferred": 1.0}
"""Spread counts double: losing one node must not take all copies of a model, and a fetch is paid once."""

CLOSED = {
    NodeState.LOST: Reason.NODE_LOST,
    NodeState.CORDONED: Reason.NODE_CORDONED,
    NodeState.DRAINING: Reason.NODE_DRAINING,
}


class Answer(NamedTuple):
    """One node's verdict, and the devices it would give."""

    verdict: Verdict
    shares: tuple[DeviceShare, ...]


class Candidates:
    """The answers of all nodes to one model, kept while a plan is made: only nodes that changed are asked again."""

    def __init__(self, spec: ModelSpec, room: Room) -> None:
        self._spec = spec
        self._room = room
        self._epochs = [room.epoch(node.id) for node in room.nodes]
        self._answers = [judge(node, spec, room) for node in room.nodes]

    def answers(self) -> list[Answer]:
        """In the order of the nodes' ids."""
        room = self._room
        for index, node in enumerate(room.nodes):
            epoch = room.epoch(node.id)
            if self._epochs[index] != epoch:
                self._epochs[index] = epoch
                self._answers[index] = judge(node, self._spec, room)
        return self._answers


def place(spec: ModelSpec, replica: str, room: Room, candidates: Candidates | None = None) -> Decision:
    """Choose nodes for all shards of a replica, or none; `room` is read, not changed.

    Returns a decision with a verdict for every node; `shards` is empty where it does not fit. `candidates` are the
    answers kept for this spec and room.
    """
    answers = (candidates or Candidates(spec, room)).answers()
    fitting = [index for index, answer in enumerate(answers) if answer.verdict.outcome is Outcome.FITS]
    winners = _winners(spec, [(index, answers[index].verdict.score) for index in fitting], room.nodes)
    shards = tuple(
        ShardAssignment(rank=rank, node=answers[index].verdict.node, devices=answers[index].shares)
        for rank, index in enumerate(winners)
    )
    verdicts = tuple(answer.verdict for answer in answers)
    if fitting and not winners:
        verdicts = _incomplete(spec, verdicts, len(fitting))
    return Decision(
        model=spec.id,
        replica=replica,
        shards=shards,
        verdicts=verdicts,
        sentence=decision_sentence(spec.name, shards, verdicts),
    )


def judge(node: NodeRecord, spec: ModelSpec, room: Room) -> Answer:
    """One node's answer for one shard."""
    excluded = _excluded(node, spec)
    if excluded is not None:
        return Answer(Verdict(node=node.id, outcome=Outcome.EXCLUDED, reason=excluded), ())
    local = spec.weights.model_id in node.inventory.weights
    if not local and spec.need.disk > node.inventory.disk_free:
        inventory = node.inventory
        return _refused(node, Reason.DISK, spec.need.disk, inventory.disk_free, inventory.disk_total)
    gpus, memory = spec.need.gpus, spec.need.memory
    devices = _devices(node, spec.constraints, gpus)
    wanted = max(1, gpus)
    if len(devices) < wanted:
        return _refused(node, Reason.GPU_COUNT, wanted, len(devices), len(devices))
    by_free = sorted((room.free(node.id, device.uuid), device.uuid, device) for device in devices)
    enough = [entry for entry in by_free if entry[0] >= memory]
    if len(enough) < wanted:
        free, _, short = by_free[-wanted]  # the best of those that are still missing decides
        reason = Reason.GPU_MEMORY if gpus else Reason.MEMORY
        return _refused(node, reason, memory, max(0, free), short.total, short)
    chosen = enough[:wanted]  # the fullest that still fit, so that large gaps stay for large models
    parts = {
        "spread": 1.0 / (1 + room.copies(spec.id, node.id)),
        "weights_local": 1.0 if local else 0.0,
        "best_fit": _best_fit(chosen, memory),
        "preferred": _preferred(node, spec.constraints),
    }
    verdict = Verdict(
        node=node.id,
        outcome=Outcome.FITS,
        need=memory,
        free=chosen[0][0],
        capacity=chosen[0][2].total,
        score=sum(SCORE_WEIGHTS[name] * part for name, part in parts.items()),
        parts=parts,
    )
    return Answer(verdict, tuple(DeviceShare(uuid=uuid, memory=memory) for _, uuid, _ in chosen))


def _excluded(node: NodeRecord, spec: ModelSpec) -> Reason | None:
    closed = CLOSED.get(node.state)
    if closed is not None:
        return closed
    constraints, inventory = spec.constraints, node.inventory
    if any(inventory.labels.get(key) != value for key, value in constraints.labels.items()):
        return Reason.LABELS
    if constraints.interconnect and spec.shards > 1 and constraints.interconnect not in inventory.labels:
        return Reason.LABELS
    if constraints.role and constraints.role not in inventory.roles:
        return Reason.ROLE
    if all(offer.engine is not spec.engine for offer in inventory.engines):
        return Reason.ENGINE_MISSING
    if spec.need.gpus and constraints.gpu_model and not _devices(node, constraints, spec.need.gpus):
        return Reason.GPU_MODEL
    return None


def _devices(node: NodeRecord, constraints: Constraints, gpus: int) -> list[Device]:
    if gpus == 0:
        return [device for device in node.inventory.devices if device.uuid == CPU]
    model = constraints.gpu_model.casefold()
    return [device for device in node.inventory.devices if device.uuid != CPU and model in device.model.casefold()]


def _refused(
    node: NodeRecord, reason: Reason, need: int, free: int, capacity: int, short: Device | None = None
) -> Answer:
    return Answer(
        Verdict(
            node=node.id,
            outcome=Outcome.REFUSED,
            reason=reason,
            need=need,
            free=free,
            capacity=capacity,
            foreign=short.foreign if short is not None else 0,
            holder=short.holders[0] if short is not None and short.holders else 0,
        ),
        (),
    )


def _best_fit(chosen: list[tuple[int, str, Device]], memory: int) -> float:
    left = sum(free - memory for free, _, _ in chosen)
    total = sum(device.total for _, _, device in chosen)
    return 1.0 - left / total if total else 0.0


def _preferred(node: NodeRecord, constraints: Constraints) -> float:
    if not constraints.prefer:
        return 0.0
    met = sum(node.inventory.labels.get(key) == value for key, value in constraints.prefer.items())
    return met / len(constraints.prefer)


def _winners(spec: ModelSpec, fitting: list[tuple[int, float]], nodes: tuple[NodeRecord, ...]) -> list[int]:
    """Indexes of the chosen nodes, best first; empty where a gang cannot be whole. Equals: the first node id."""
    if spec.shards == 1:
        return [max(fitting, key=lambda entry: (entry[1], -entry[0]))[0]] if fitting else []
    groups: dict[str, list[tuple[int, float]]] = {}
    label = spec.constraints.interconnect
    for entry in fitting:
        groups.setdefault(nodes[entry[0]].inventory.labels.get(label, "") if label else "", []).append(entry)
    best: list[tuple[int, float]] = []
    for _, group in sorted(groups.items()):
        top = sorted(group, key=lambda entry: (-entry[1], entry[0]))[: spec.shards]
        if len(top) == spec.shards and sum(e[1] for e in top) > sum(e[1] for e in best):
            best = top
    return [index for index, _ in best]


def _incomplete(spec: ModelSpec, verdicts: tuple[Verdict, ...], count: int) -> tuple[Verdict, ...]:
    """Nodes that could take a shard of a gang that cannot be whole do not fit it either."""
    return tuple(
        verdict
        if verdict.outcome is not Outcome.FITS
        else Verdict(
            node=verdict.node, outcome=Outcome.REFUSED, reason=Reason.GANG_INCOMPLETE, need=spec.shards, free=count
        )
        for verdict in verdicts
    )

"""Where a replica goes: every node is asked, every node answers, the best of those that fit win."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fleet.devices import suiting
from fleet.reasons import Reason
from fleet.render import decision_sentence
from fleet.room import Free, Room
from fleet.spec import Constraints, ModelSpec
from fleet.state import (
    Decision,
    Device,
    DeviceShare,
    NodeRecord,
    NodeState,
    Outcome,
    ShardAssignment,
    Verdict,
)

Weights = Mapping[str, float]
"""How much each part of a score counts, by its name."""

SCORE_WEIGHTS: Weights = MappingProxyType({"spread": 4.0, "weights_local": 1.0, "best_fit": 1.0, "preferred": 1.0})
"""Losing one node must not take all copies of a model: half of spread, which a first copy costs a node, is as much as
the weights being there and the best fit together. A fetch is paid once."""

CLOSED = {
    NodeState.LOST: Reason.NODE_LOST,
    NodeState.CORDONED: Reason.NODE_CORDONED,
    NodeState.DRAINING: Reason.NODE_DRAINING,
}

NOT_FITTING = float("-inf")
"""The score of a node that does not fit: beneath any other."""


class Answer(NamedTuple):
    """One node's verdict, and the uuids of the devices it would give."""

    verdict: Verdict
    devices: tuple[str, ...]


class Standing(NamedTuple):
    """What one node offers a kind of model whatever is free on it: it stays the same while a plan is made."""

    node: NodeRecord
    no: Answer | None
    """Its answer, where nothing that a plan frees could change it."""
    totals: tuple[int, ...]
    """Usable bytes of the devices that suit, the largest first."""
    preferred: float


class Standings:
    """What the nodes of a room offer, kept for all models that ask for the same kind of node."""

    def __init__(self, nodes: Sequence[NodeRecord]) -> None:
        self._nodes = nodes
        self._kept: dict[tuple[object, ...], list[Standing]] = {}

    def of(self, spec: ModelSpec) -> list[Standing]:
        """In the order of the nodes."""
        key = (spec.engine, spec.need.gpus, spec.shards > 1, spec.constraints.model_dump_json())
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = [_standing(node, spec) for node in self._nodes]
        return found


class Candidates:
    """The answers of all nodes to one model, kept while a plan is made: only nodes that changed are asked again."""

    def __init__(
        self, spec: ModelSpec, room: Room, standings: Standings | None = None, weights: Weights = SCORE_WEIGHTS
    ) -> None:
        self._spec = spec
        self._room = room
        self._weights = weights
        self._moment = room.moment
        self._standings = (standings or Standings(room.nodes)).of(spec)
        self._places = {node.id: index for index, node in enumerate(room.nodes)}
        model = spec.id
        self._answers = [_answer(standing, spec, model, room, weights) for standing in self._standings]
        self._scores = [_score(answer) for answer in self._answers]

    def answers(self) -> list[Answer]:
        """In the order of the nodes' ids."""
        self._ask_again()
        return self._answers

    def winners(self) -> list[int]:
        """Indexes of the nodes that would take its shards, the best first; empty where not all of them fit."""
        self._ask_again()
        return _winners(self._spec, self._scores, self._room.nodes)

    def shards(self) -> tuple[ShardAssignment, ...]:
        """Where the next replica would go; empty where it does not fit."""
        return tuple(_shard(rank, self._answers[index], self._spec) for rank, index in enumerate(self.winners()))

    def fits(self, index: int) -> bool:
        """Whether this node could take a shard now."""
        self._ask_again()
        return self._scores[index] != NOT_FITTING

    def could_fit(self, index: int) -> bool:
        """Whether this node could take a shard if none of ours held anything there."""
        standing, need = self._standings[index], self._spec.need
        return standing.no is None and standing.totals[max(1, need.gpus) - 1] >= need.memory

    def _ask_again(self) -> None:
        room = self._room
        if self._moment == room.moment:
            return
        model = self._spec.id
        for node in room.changed_since(self._moment):
            index = self._places.get(node)
            if index is not None:
                answer = _answer(self._standings[index], self._spec, model, room, self._weights)
                self._answers[index] = answer
                self._scores[index] = _score(answer)
        self._moment = room.moment


def place(spec: ModelSpec, replica: str, room: Room, candidates: Candidates | None = None) -> Decision:
    """Choose nodes for all shards of a replica, or none; `room` is read, not changed.

    Returns a decision with a verdict for every node; `shards` is empty where it does not fit. `candidates` are the
    answers kept for this spec and room.
    """
    asked = candidates or Candidates(spec, room)
    shards = asked.shards()
    answers = asked.answers()
    verdicts = tuple([answer.verdict for answer in answers])
    if not shards:
        verdicts = _incomplete(spec, verdicts)
    return Decision(
        model=spec.id,
        replica=replica,
        shards=shards,
        verdicts=verdicts,
        sentence=decision_sentence(spec.name, shards, verdicts),
    )


def judge(node: NodeRecord, spec: ModelSpec, room: Room) -> Answer:
    """One node's answer for one shard."""
    return _answer(_standing(node, spec), spec, spec.id, room, SCORE_WEIGHTS)


def _shard(rank: int, answer: Answer, spec: ModelSpec) -> ShardAssignment:
    need = spec.need
    return ShardAssignment(
        rank=rank,
        node=answer.verdict.node,
        devices=tuple(DeviceShare(uuid=uuid, memory=need.memory) for uuid in answer.devices),
        weights=spec.weights.model_id,
        disk=need.disk,
    )


def _standing(node: NodeRecord, spec: ModelSpec) -> Standing:
    excluded = _excluded(node, spec)
    if excluded is not None:
        closed = Answer(Verdict(node=node.id, outcome=Outcome.EXCLUDED, reason=excluded), ())
        return Standing(node, closed, (), preferred=0.0)
    devices = suiting(node.inventory.devices, spec.need.gpus, spec.constraints.gpu_model)
    wanted = max(1, spec.need.gpus)
    no: Answer | None = None
    if len(devices) < wanted:
        no = _refused(node, Reason.GPU_COUNT, wanted, len(devices), len(devices))
    totals = tuple(sorted([device.usable for device in devices], reverse=True))
    return Standing(node, no, totals, _preferred(node, spec.constraints))


def _answer(standing: Standing, spec: ModelSpec, model: str, room: Room, weights: Weights) -> Answer:
    """`model` is the spec's id, which is costly to make anew for each node."""
    node, no, _, preferred = standing
    if no is not None:
        return no
    need = spec.need
    gpus, memory, weights_id = need.gpus, need.memory, spec.weights.model_id
    disk = room.disk(node.id, weights_id)
    if disk is not None and need.disk > max(0, disk):
        return _refused(node, Reason.DISK, need.disk, max(0, disk), node.inventory.disk_total)
    wanted = gpus or 1
    by_free = room.by_free(node.id, gpus == 0)
    if gpus and spec.constraints.gpu_model:
        named = spec.constraints.gpu_model.casefold()
        by_free = [entry for entry in by_free if named in entry.device.model.casefold()]
    if by_free[-wanted].size < memory:
        free, _, short = by_free[-wanted]  # the best of those that are still missing decides
        return _refused(node, Reason.GPU_MEMORY if gpus else Reason.MEMORY, memory, max(0, free), short.total, short)
    first = next(index for index, entry in enumerate(by_free) if entry.size >= memory)
    chosen = by_free[first : first + wanted]  # the fullest that still fit: large gaps stay for large models
    parts = {
        "spread": 1.0 / (1 + room.copies(model, node.id)),
        "weights_local": 1.0 if room.holds(node.id, weights_id) else 0.0,
        "best_fit": _best_fit(chosen, memory),
        "preferred": preferred,
    }
    verdict = Verdict(
        node=node.id,
        outcome=Outcome.FITS,
        need=memory,
        free=chosen[0].size,
        capacity=chosen[0].device.total,
        score=sum([weights[name] * part for name, part in parts.items()]),
        parts=parts,
    )
    return Answer(verdict, tuple([entry.uuid for entry in chosen]))


def _score(answer: Answer) -> float:
    verdict = answer.verdict
    return verdict.score if verdict.outcome is Outcome.FITS else NOT_FITTING


def _excluded(node: NodeRecord, spec: ModelSpec) -> Reason | None:
    closed = CLOSED.get(node.state)
    if closed is not None:
        return closed
    if node.quarantine:
        return Reason.NODE_QUARANTINED
    constraints, inventory = spec.constraints, node.inventory
    if any(inventory.labels.get(key) != value for key, value in constraints.labels.items()):
        return Reason.LABELS
    if constraints.interconnect and spec.shards > 1 and constraints.interconnect not in inventory.labels:
        return Reason.LABELS
    if constraints.role and constraints.role not in inventory.roles:
        return Reason.ROLE
    if spec.engine not in [offer.engine for offer in inventory.engines]:
        return Reason.ENGINE_MISSING
    if spec.trust_remote_code and not inventory.trust_remote_code:
        return Reason.REMOTE_CODE
    gpus, model = spec.need.gpus, constraints.gpu_model
    if gpus and model and not suiting(inventory.devices, gpus, model):
        return Reason.GPU_MODEL
    return None


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


def _best_fit(chosen: list[Free], memory: int) -> float:
    left = total = 0
    for free, _, device in chosen:
        left += free - memory
        total += device.total
    return 1.0 - left / total if total else 0.0


def _preferred(node: NodeRecord, constraints: Constraints) -> float:
    if not constraints.prefer:
        return 0.0
    met = sum(node.inventory.labels.get(key) == value for key, value in constraints.prefer.items())
    return met / len(constraints.prefer)


def _winners(spec: ModelSpec, scores: list[float], nodes: tuple[NodeRecord, ...]) -> list[int]:
    """Indexes of the chosen nodes, best first; empty where a gang cannot be whole. Equals: the first node id."""
    if spec.shards == 1:
        highest = max(scores, default=NOT_FITTING)
        return [scores.index(highest)] if highest != NOT_FITTING else []
    groups: dict[str, list[int]] = {}
    label = spec.constraints.interconnect
    for index, score in enumerate(scores):
        if score != NOT_FITTING:
            value = nodes[index].inventory.labels.get(label, "") if label else ""
            groups.setdefault(value, []).append(index)
    best, best_sum = list[int](), 0.0
    for _, members in sorted(groups.items()):
        top = sorted(members, key=lambda index: (-scores[index], index))[: spec.shards]
        total = sum(scores[index] for index in top)
        if len(top) == spec.shards and total > best_sum:
            best, best_sum = top, total
    return best


def _incomplete(spec: ModelSpec, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """Nodes that could take a shard of a gang that cannot be whole do not fit it either."""
    count = sum(verdict.outcome is Outcome.FITS for verdict in verdicts)
    return tuple(
        verdict
        if verdict.outcome is not Outcome.FITS
        else Verdict(
            node=verdict.node, outcome=Outcome.REFUSED, reason=Reason.GANG_INCOMPLETE, need=spec.shards, free=count
        )
        for verdict in verdicts
    )

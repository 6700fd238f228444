"""A plan under construction: what is free shrinks as it goes, and each replica is decided on once."""

from collections.abc import Iterable

from fleet.arrangement import TIGHT, Want
from fleet.demand import Target, target
from fleet.placement import SCORE_WEIGHTS, Candidates, Standings, Weights, place
from fleet.render import requests
from fleet.room import Room, room_of
from fleet.state import (
    Decision,
    FleetState,
    ModelRecord,
    NodeState,
    ReplicaRecord,
    ReplicaState,
    ShardAssignment,
)
from fleet.steps import Plan, Step, StepKind

WANTED_STATES = frozenset(
    {ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.FAILED},
)
"""States in which a replica fills one of its model's places."""

GOING_STATES = frozenset({ReplicaState.DRAINING, ReplicaState.DRAINED, ReplicaState.STOPPING})
"""States in which a replica holds memory that will be free soon."""


CAN_GO = frozenset({ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.SERVING})
"""States in which a replica holds memory and nothing has been decided against it yet."""


class Draft:
    """The working values of one plan."""

    def __init__(self, state: FleetState, now: float) -> None:
        self.state = state
        self.now = now
        self.room: Room = room_of(state)
        self.replicas: dict[str, list[ReplicaRecord]] = {key: [] for key in state.models}
        """Each model's replicas, by id."""
        for replica in sorted(state.replicas.values(), key=lambda replica: replica.id):
            self.replicas.setdefault(replica.model, []).append(replica)
        self.models: list[ModelRecord] = sorted(state.models.values(), key=_rank)
        """The most important first; among equals what needs the most devices at once, then the most memory on each,
        as small ones fit into what large ones leave and not the other way round; then the oldest wish."""
        self.acted: set[str] = set()
        """Replicas an earlier rule has decided on."""
        self.ended: set[str] = set()
        """Of those, the ones that go."""
        self.refused: dict[str, tuple[StepKind, str, str]] = {}
        """Model → the first placement that found no room: kind, replica, reason."""
        self.placing: set[str] = set()
        """Models that get a replica by this plan."""
        self.promises: dict[str, tuple[ShardAssignment, ...]] = {}
        """Model → where room is being made for its next replica."""
        self._steps: list[Step] = []
        self._scaled: dict[str, int] = {}
        self._touched: dict[str, int] = {}
        self._generation = state.generation
        self.standings = Standings(self.room.nodes)
        self._candidates: dict[str, Candidates] = {}
        self._targets: dict[str, Target] = {}
        self._unsettled: set[str] = set()
        """Models of which this plan has ended a start after it had asked how many replicas they should have."""
        self._gave_away: set[str] = set()
        """Models that go to zero whatever their requests."""

    def target(self, model: ModelRecord) -> Target:
        """How many replicas it should have; a number that changes by demand becomes part of the plan."""
        found = self._targets.get(model.spec.id)
        if found is None:
            found = target(model, self.replicas[model.spec.id], self.now, self.ended)
            self._targets[model.spec.id] = found
            if model.spec.scaling is not None and not model.removing and found.replicas != model.scaled:
                self._scale(model, found.replicas)
        return found

    def settle(self, model: ModelRecord) -> None:
        """Where this plan ended a start of it, one that starts may be all that kept it from zero: ask anew."""
        if model.spec.id not in self._unsettled - self._gave_away:
            return
        self._unsettled.discard(model.spec.id)
        del self._targets[model.spec.id]
        self._scaled.pop(model.spec.id, None)
        found = self.target(model)
        if found.replicas == 0:
            for replica in self.replicas[model.spec.id]:
                if replica.state in WANTED_STATES:
                    self.end(StepKind.SCALE_DOWN, replica, f"{found.reason}: none stays")

    def to_zero(self, model: ModelRecord) -> None:
        """An idle model gives its room to another."""
        self._gave_away.add(model.spec.id)
        self._targets[model.spec.id] = Target(0, "it gave its room away")
        self._scale(model, 0)

    def _scale(self, model: ModelRecord, replicas: int) -> None:
        self._scaled[model.spec.id] = replicas
        self.touch_model(model)

    def on_draining(self, replica: ReplicaRecord) -> bool:
        """Whether a shard of it is on a node that drains."""
        nodes = self.state.nodes
        return any(node in nodes and nodes[node].state is NodeState.DRAINING for node in replica.nodes)

    def end(self, kind: StepKind, replica: ReplicaRecord, reason: str) -> None:
        """Let a replica go: by a drain where it serves, at once where it does not; once."""
        if replica.id in self.acted or replica.state in (ReplicaState.DRAINING, ReplicaState.STOPPING):
            return
        if replica.state is ReplicaState.DRAINED:
            reason = _drained(replica)
        serving = replica.state is ReplicaState.SERVING
        if not serving and kind is StepKind.DRAIN:
            kind = StepKind.STOP
        self.add(kind, replica, reason, at_once=not serving)
        self.ended.add(replica.id)
        if replica.state in (ReplicaState.PLACED, ReplicaState.STARTING) and replica.model in self._targets:
            self._unsettled.add(replica.model)
        if replica.state in CAN_GO:
            self.room.leave(replica.model, replica.shards)

    def add(
        self,
        kind: StepKind,
        replica: ReplicaRecord,
        reason: str,
        *,
        at_once: bool = False,
        lost: Iterable[str] = (),
    ) -> None:
        """A step on a replica that exists; the first rule that decides on it wins."""
        if replica.id in self.acted:
            return
        self.acted.add(replica.id)
        self._touched[f"replica/{replica.id}"] = replica.version
        if replica.model in self.state.models:
            self.touch_model(self.state.models[replica.model])
        self._steps.append(
            Step(
                kind=kind,
                reason=reason,
                model=replica.model,
                replica=replica.id,
                generation=replica.generation,
                at_once=at_once,
                lost=tuple(lost),
                frees=sum(share.memory for shard in replica.shards for share in shard.devices),
            )
        )

    def place(self, want: Want, weights: Weights = SCORE_WEIGHTS) -> bool:
        """Place one replica; False, and noted as refused, where nothing fits."""
        kind, model, replica, reason = want
        decision = place(model.spec, replica, self.room, self.candidates(model, weights))
        if weights is TIGHT and decision.shards:
            decision = decision.model_copy(update={"sentence": f"{decision.sentence}, packed so that more fits"})
        self.touch_model(model)
        if not decision.shards:
            self.refused.setdefault(model.spec.id, (kind, replica, reason))
            return False
        self._generation += 1
        self.room.take(model.spec.id, decision.shards)
        self.acted.add(replica)
        self.placing.add(model.spec.id)
        for shard in decision.shards:
            self.touch_node(shard.node)
        if replica in self.state.replicas:
            self._touched[f"replica/{replica}"] = self.state.replicas[replica].version
        self._steps.append(
            Step(
                kind=kind,
                reason=reason,
                model=model.spec.id,
                replica=replica,
                generation=self._generation,
                decision=decision,
            )
        )
        return True

    def candidates(self, model: ModelRecord, weights: Weights = SCORE_WEIGHTS) -> Candidates:
        """The nodes' answers to a model."""
        if weights is not SCORE_WEIGHTS:
            return Candidates(model.spec, self.room, self.standings, weights)
        kept = self._candidates.get(model.spec.id)
        if kept is None:
            # Models are placed one after the other: only those that were refused are asked about again, at the end.
            self._candidates = {key: one for key, one in self._candidates.items() if key in self.refused}
            kept = self._candidates[model.spec.id] = Candidates(model.spec, self.room, self.standings)
        return kept

    def promise(self, model: ModelRecord, shards: tuple[ShardAssignment, ...]) -> None:
        """Keep room that is being made: what is less important and comes later in this pass must not take it."""
        self.promises[model.spec.id] = shards
        self.room.take(model.spec.id, shards)

    def touch_model(self, model: ModelRecord) -> None:
        """The plan relies on this model as it is."""
        self._touched[f"model/{model.spec.id}"] = model.version

    def touch_node(self, node: str) -> None:
        """The plan relies on this node as it is."""
        self._touched[f"node/{node}"] = self.state.nodes[node].version

    def finish(self) -> Plan:
        """The plan, with what is refused as things stand at its end.

        The same refusal again is no step, or a waiting model would cause passes without end.
        """
        for name, shards in self.promises.items():
            self.room.give(name, shards)  # nobody has that yet
        for name, (kind, replica, reason) in self.refused.items():
            model = self.state.models[name]
            decision = self._refusal(model, place(model.spec, replica, self.room, self.candidates(model)))
            # A placement of the same pass takes back what was said before.
            if name in self.placing or decision.sentence != model.waiting:
                self._steps.append(Step(kind=kind, reason=reason, model=name, replica=replica, decision=decision))
        over = [model for key, model in self.state.models.items() if model.waiting and not self._asks(key)]
        for model in over:
            self.touch_model(model)
        return Plan(
            steps=tuple(self._steps),
            scaled=self._scaled,
            waits_over=tuple(model.spec.id for model in over),
            touched=self._touched,
        )

    def _asks(self, model: str) -> bool:
        """Whether a place was looked for; what came of that is what the model waits for, or that it does not."""
        return model in self.placing or model in self.refused

    def _refusal(self, model: ModelRecord, decision: Decision) -> Decision:
        sentence = decision.sentence
        if decision.shards:
            others = ", ".join(self.state.models[name].spec.name for name in self.promises if name != model.spec.id)
            sentence = f"{model.spec.name} would fit, but that room is kept for {others}"
        elif model.spec.id in self.promises:
            sentence = f"{sentence}; room is being made"
        elif versions := self._still_serving(model):
            why = "" if model.spec.rollout.recreate else ", as the rollout may not recreate"
            sentence = f"{sentence}; version {versions} goes on serving{why}"
        return decision.model_copy(update={"shards": (), "sentence": sentence})

    def _still_serving(self, model: ModelRecord) -> str:
        """The versions before the current one that serve on."""
        old = {
            replica.spec_version
            for replica in self.replicas[model.spec.id]
            if replica.state is ReplicaState.SERVING and replica.id not in self.ended
        } - {model.spec_version}
        return " and ".join(str(version) for version in sorted(old))


def _drained(replica: ReplicaRecord) -> str:
    if replica.cut_short:
        return f"it is drained, by its deadline: {requests(replica.cut_short)} in flight"
    return "it is drained"


def _rank(model: ModelRecord) -> tuple[int, int, int, float, str]:
    spec = model.spec
    return -spec.priority, -max(1, spec.need.gpus), -spec.need.memory, model.applied_at, spec.id

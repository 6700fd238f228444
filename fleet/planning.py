"""What should happen next: `plan(state, now)` names every step of a pass with its reason, and decides nothing twice.

Order: reap, stop what is not wanted, drain, scale down, restart, place what is missing (by priority). What is not
wanted goes before restarts, so that nothing is started that the next pass would stop. A plan
applied to its own outcome (`fleet.transitions.commit`) has no further steps.
"""

import hashlib
from enum import StrEnum

from fleet.placement import Free, free_of, place
from fleet.reasons import Reason
from fleet.records import Record
from fleet.state import (
    Decision,
    FleetState,
    ModelRecord,
    NodeState,
    ReplicaRecord,
    ReplicaState,
    RestartPolicy,
)


class StepKind(StrEnum):
    """What a step does. The value is its span's name."""

    REAP = "reap"
    RESTART = "restart"
    STOP = "stop replica"
    DRAIN = "drain"
    SCALE_DOWN = "scale down"
    SCALE_UP = "scale up"
    RESUME = "resume start"  # the pass that placed it died before it started the workflow


class Step(Record):
    """One act of a pass."""

    kind: StepKind
    reason: str
    model: str
    replica: str
    generation: int = 0
    """Of the replica it acts on; for one that is placed, the new one."""
    decision: Decision | None = None
    """Where it goes, or why nowhere, for the kinds that place."""

    @property
    def places(self) -> bool:
        """Whether it starts a replica's workflow."""
        return self.kind is StepKind.RESUME or (self.decision is not None and bool(self.decision.shards))


class Plan(Record):
    """A pass, decided."""

    steps: tuple[Step, ...] = ()
    touched: dict[str, int] = {}
    """The version of each model, node and replica the plan relies on: `model/<id>`, `node/<id>`, `replica/<id>`."""


WANTED_STATES = frozenset(
    {ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.SERVING, ReplicaState.FAILED},
)
"""States in which a replica fills one of its model's places."""


def plan(state: FleetState, now: float) -> Plan:
    """Decide one pass. `now` is seconds since the epoch; the same arguments give the same plan."""
    return _Pass(state, now).run()


def next_deadline(state: FleetState, after: float) -> float | None:
    """When time alone makes a pass due: the end of a backoff, or of a start that nobody acknowledged.

    Moments up to `after` (the time of the last pass) do not count: that pass saw them, and only a change of the
    state could give another answer.
    """
    moments = (_due(state, replica) for replica in state.replicas.values())
    return min((moment for moment in moments if moment is not None and moment > after), default=None)


def backoff_s(policy: RestartPolicy, replica: str, failures: int) -> float:
    """Seconds to wait after the n-th failure in the window: doubling, capped, up to a quarter longer by jitter.

    The jitter comes from a hash of replica and count, so that it differs between replicas and repeats in a replay.
    """
    wait = min(policy.cap_s, policy.base_s * 2.0 ** min(max(0, failures - 1), 32))
    digest = hashlib.sha256(f"{replica}/{failures}".encode()).digest()
    return wait * (1.0 + digest[0] / 255 / 4)


def _due(state: FleetState, replica: ReplicaRecord) -> float | None:
    if replica.state is ReplicaState.PLACED:
        return replica.since + state.policy.unstarted_after_s
    if replica.state is not ReplicaState.FAILED or replica.given_up:
        return None
    if replica.failure is not None and replica.failure.reason is Reason.NODE_LOST:
        return replica.since  # the node is to blame, not the replica: no wait
    return replica.since + backoff_s(state.policy.restart, replica.id, len(replica.failures))


class _Pass:
    """The working values of one plan: what is free shrinks as placements are made."""

    def __init__(self, state: FleetState, now: float) -> None:
        self.state = state
        self.now = now
        self.free: Free = free_of(state)
        self.generation = state.generation
        self.steps: list[Step] = []
        self.acted: set[str] = set()
        self.refused: dict[str, tuple[StepKind, str, str]] = {}
        """Model → the first placement that found no room."""
        self.touched: dict[str, int] = {}

    def run(self) -> Plan:
        replicas = sorted(self.state.replicas.values(), key=lambda replica: replica.id)
        by_model: dict[str, list[ReplicaRecord]] = {}
        for replica in replicas:
            by_model.setdefault(replica.model, []).append(replica)
        for replica in replicas:
            self._reap(replica)
        for model in self._by_priority():
            self._retire(model, by_model.get(model.spec.id, []))
        for model in self._by_priority():
            for replica in by_model.get(model.spec.id, []):
                self._restart(model, replica)
        for model in self._by_priority():
            self._scale_up(model, by_model.get(model.spec.id, []))
        self._say_refusals()
        return Plan(steps=tuple(self.steps), touched=self.touched)

    def _by_priority(self) -> list[ModelRecord]:
        return sorted(self.state.models.values(), key=lambda model: (-model.spec.priority, model.applied_at))

    def _reap(self, replica: ReplicaRecord) -> None:
        if replica.state is ReplicaState.FAILED:
            return
        lost = [
            node
            for node in replica.nodes
            if node not in self.state.nodes or self.state.nodes[node].state is NodeState.LOST
        ]
        if lost:
            for name in lost:
                if name in self.state.nodes:
                    self._touch_node(name)
            self._add(StepKind.REAP, replica, f"{', '.join(lost)} is lost")

    def _restart(self, model: ModelRecord, replica: ReplicaRecord) -> None:
        due = _due(self.state, replica)
        if due is None or due > self.now or model.removing or replica.id in self.acted:
            return
        if replica.state is ReplicaState.PLACED:
            self._add(StepKind.RESUME, replica, "its start was not acknowledged")
        elif replica.spec_version == model.spec_version:
            failure = replica.failure.line if replica.failure else "it failed"
            self._place(StepKind.RESTART, model, replica.id, failure)

    def _retire(self, model: ModelRecord, replicas: list[ReplicaRecord]) -> None:
        current = [replica for replica in replicas if replica.spec_version == model.spec_version]
        if model.removing:
            for replica in replicas:
                self._send_off(StepKind.DRAIN, replica, f"{model.spec.name} is removed")
            return
        if any(replica.state is ReplicaState.SERVING for replica in current) or model.spec.replicas == 0:
            for replica in replicas:
                if replica.spec_version != model.spec_version:
                    self._send_off(StepKind.DRAIN, replica, f"version {model.spec_version} of the spec serves")
        surplus = [replica for replica in current if replica.state in WANTED_STATES]
        # Those that cost least to lose go first: not yet serving, then the youngest.
        surplus.sort(key=lambda replica: (replica.state is ReplicaState.SERVING, -replica.since, replica.id))
        for replica in surplus[: max(0, len(surplus) - model.spec.replicas)]:
            self._send_off(StepKind.SCALE_DOWN, replica, f"wanted {model.spec.replicas}, there are {len(surplus)}")
        for replica in replicas:
            self._send_off_drained(replica)

    def _send_off(self, kind: StepKind, replica: ReplicaRecord, reason: str) -> None:
        if replica.state is ReplicaState.SERVING:
            self._add(kind, replica, reason)
        elif replica.state in (ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.FAILED):
            self._add(StepKind.STOP, replica, reason)
        else:
            self._send_off_drained(replica)

    def _send_off_drained(self, replica: ReplicaRecord) -> None:
        if replica.state is ReplicaState.DRAINED:
            self._add(StepKind.STOP, replica, "it is drained")

    def _scale_up(self, model: ModelRecord, replicas: list[ReplicaRecord]) -> None:
        if model.removing:
            return
        filled = sum(
            replica.spec_version == model.spec_version and replica.state in WANTED_STATES for replica in replicas
        )
        for offset in range(model.spec.replicas - filled):
            name = f"{model.spec.id}-{model.next_ordinal + offset}"
            reason = f"wanted {model.spec.replicas}, there are {filled + offset}"
            if not self._place(StepKind.SCALE_UP, model, name, reason):
                return  # the next one would get the same answer

    def _place(self, kind: StepKind, model: ModelRecord, replica: str, reason: str) -> bool:
        decision = place(self.state, model, replica, self.free)
        self._touch_model(model)
        if not decision.shards:
            self.refused.setdefault(model.spec.id, (kind, replica, reason))
            return False
        self.generation += 1
        self.free.take(model.spec.id, decision.shards)
        for shard in decision.shards:
            self._touch_node(shard.node)
        if replica in self.state.replicas:
            self.touched[f"replica/{replica}"] = self.state.replicas[replica].version
        self.steps.append(
            Step(
                kind=kind,
                reason=reason,
                model=model.spec.id,
                replica=replica,
                generation=self.generation,
                decision=decision,
            )
        )
        return True

    def _say_refusals(self) -> None:
        """Record why models wait, as things stand once all that fits is placed.

        The same refusal again is no step, or a waiting model would cause passes without end.
        """
        for name, (kind, replica, reason) in self.refused.items():
            model = self.state.models[name]
            decision = place(self.state, model, replica, self.free)
            # A placement of the same pass takes back what was said before.
            placed = any(step.model == name and step.decision is not None for step in self.steps)
            if placed or decision.sentence != model.waiting:
                self.steps.append(Step(kind=kind, reason=reason, model=name, replica=replica, decision=decision))

    def _add(self, kind: StepKind, replica: ReplicaRecord, reason: str) -> None:
        if replica.id in self.acted:
            return  # an earlier rule of the order already decided
        self.acted.add(replica.id)
        self.touched[f"replica/{replica.id}"] = replica.version
        if replica.model in self.state.models:
            self._touch_model(self.state.models[replica.model])
        self.steps.append(
            Step(kind=kind, reason=reason, model=replica.model, replica=replica.id, generation=replica.generation)
        )

    def _touch_model(self, model: ModelRecord) -> None:
        self.touched[f"model/{model.spec.id}"] = model.version

    def _touch_node(self, node: str) -> None:
        self.touched[f"node/{node}"] = self.state.nodes[node].version

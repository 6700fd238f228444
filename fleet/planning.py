"""What should happen next: `plan(state, now)` names every step of a pass with its reason, and decides nothing twice.

Order: reap, say again what was not done, stop and drain what is not wanted, scale down, then model by model, the most
important first: restart, place what is missing, make room for what did not fit. What is not wanted goes before
restarts, so that nothing is started that the next pass would stop. A plan applied to its own outcome
(`fleet.commits.commit`) is quiet.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from fleet.arrangement import Want, arranged
from fleet.demand import load_at, moments
from fleet.draft import GOING_STATES, WANTED_STATES, Draft
from fleet.reasons import Reason
from fleet.state import FleetState, ModelRecord, NodeState, ReplicaRecord, ReplicaState, RestartPolicy
from fleet.steps import Plan, StepKind
from fleet.victims import idle_moments, make_room, may_find_room


def plan(state: FleetState, now: float) -> Plan:
    """Decide one pass. `now` is seconds since the epoch; the same arguments give the same plan."""
    draft = Draft(state, now)
    _reap(draft)
    _remind(draft)
    for model in draft.models:
        _retire(draft, model)
    for _, equals in groupby(draft.models, key=lambda model: model.spec.priority):
        _fill(draft, [model for model in equals if not model.removing])
    return draft.finish()


def _fill(draft: Draft, models: list[ModelRecord]) -> None:
    """Start what is missing of models of one priority, and make room for what does not fit."""
    for model in models:
        draft.settle(model)
    for model in models:
        _resume(draft, model)
    _arrange(draft, models)
    for model in models:
        for want in _wants(draft, model):
            if want.replica not in draft.acted and not draft.place(want):
                break  # the next one would get the same answer
        if model.spec.id in draft.refused:
            make_room(draft, model, draft.refused[model.spec.id][1])


def _arrange(draft: Draft, models: list[ModelRecord]) -> None:
    """Place in another order than that of the models, where more fits then and nobody need go for it."""
    wants = [want for model in models for want in _wants(draft, model)]
    better = arranged(draft.room, draft.standings, wants)
    if better is None or not (better.complete or not any(may_find_room(draft, model) for model in models)):
        return
    for want in better.wants:
        draft.place(want, better.weights)


def next_deadline(state: FleetState, after: float) -> float | None:
    """When time alone makes a pass due: a backoff, an unacknowledged start, a cool-down, the end of a node's drain.

    Moments up to `after` (the time of the last pass) do not count: that pass saw them, and only a change of the
    state could give another answer.
    """
    return min((moment for moment in _moments(state) if moment > after), default=None)


class Due(NamedTuple):
    """Something that waited for a moment, and the trace of what made it wait."""

    sentence: str
    trace: str


def came_due(state: FleetState, after: float, now: float) -> tuple[Due, ...]:
    """Whose moment came since the last pass: what a pass that time alone makes due is there for."""
    found = [
        *((_due(state, one), Due(f"{one.id}: its wait is over", one.trace)) for one in state.replicas.values()),
        *(
            (node.drain_until, Due(f"{node.id}: the deadline of its drain came", node.trace))
            for node in state.nodes.values()
            if node.state is NodeState.DRAINING
        ),
    ]
    return tuple(due for moment, due in found if moment is not None and after < moment <= now)


def next_pass(state: FleetState, after: float) -> float | None:
    """`next_deadline`, or sooner where something waits and a model becomes idle enough to be evicted for it."""
    due = next_deadline(state, after)
    if not any(model.waiting for model in state.models.values()):
        return due
    idle = (moment for moment in idle_moments(state.models.values(), _by_model(state)) if moment > after)
    return min((moment for moment in (due, *idle) if moment is not None), default=None)


def backoff_s(policy: RestartPolicy, replica: str, failures: int) -> float:
    """Seconds to wait after the n-th failure in the window: doubling, capped, up to a quarter longer by jitter.

    The jitter comes from a hash of replica and count, so that it differs between replicas and repeats in a replay.
    """
    wait = min(policy.cap_s, policy.base_s * 2.0 ** min(max(0, failures - 1), 32))
    digest = hashlib.sha256(f"{replica}/{failures}".encode()).digest()
    return wait * (1.0 + digest[0] / 255 / 4)


def _moments(state: FleetState) -> Iterator[float]:
    for replica in state.replicas.values():
        due = _due(state, replica)
        if due is not None:
            yield due
    replicas = _by_model(state)
    for model in state.models.values():
        yield from moments(model, replicas.get(model.spec.id, []))
    for node in state.nodes.values():
        if node.state is NodeState.DRAINING:
            yield node.drain_until


def _by_model(state: FleetState) -> dict[str, list[ReplicaRecord]]:
    replicas: dict[str, list[ReplicaRecord]] = {}
    for replica in state.replicas.values():
        replicas.setdefault(replica.model, []).append(replica)
    return replicas


def _due(state: FleetState, replica: ReplicaRecord) -> float | None:
    """When a replica is to be started (again)."""
    if replica.state is ReplicaState.PLACED:
        return replica.since + state.policy.unstarted_after_s
    if replica.state in GOING_STATES:
        return _overdue(state, replica)
    if replica.state is not ReplicaState.FAILED or replica.given_up:
        return None
    if replica.failure is not None and replica.failure.reason is Reason.NODE_LOST:
        return replica.since  # the node is to blame, not the replica: no wait
    return replica.since + backoff_s(state.policy.restart, replica.id, len(replica.failures))


def _overdue(state: FleetState, replica: ReplicaRecord) -> float | None:
    """When a drain or stop is said again: the pass that decided it may have died before it told anybody."""
    model = state.models.get(replica.model)
    patience = state.policy.unstarted_after_s
    if replica.state is ReplicaState.DRAINING:
        return replica.since + patience + (model.spec.drain_deadline_s if model is not None else 0.0)
    return replica.since + patience if replica.state is ReplicaState.STOPPING else None


def _remind(draft: Draft) -> None:
    """Say again what was decided and not done; both verbs may be said twice."""
    for replicas in draft.replicas.values():
        for replica in replicas:
            due = _overdue(draft.state, replica)
            if due is None or due > draft.now:
                continue
            draining = replica.state is ReplicaState.DRAINING
            kind = StepKind.DRAIN if draining else StepKind.STOP
            draft.add(kind, replica, "it was told to and has not: said again", at_once=not draining)


def _reap(draft: Draft) -> None:
    """Take replicas from lost nodes; under the brake only from those whose agent said goodbye."""
    nodes = draft.state.nodes
    for replicas in draft.replicas.values():
        for replica in replicas:
            lost = [
                name
                for name in replica.nodes
                if name not in nodes
                or (nodes[name].state is NodeState.LOST and (nodes[name].left or not draft.state.brake))
            ]
            if replica.state is ReplicaState.FAILED or not lost:
                continue
            for name in lost:
                if name in nodes:
                    draft.touch_node(name)
            draft.add(StepKind.REAP, replica, f"{', '.join(lost)} is lost", lost=lost)


def _retire(draft: Draft, model: ModelRecord) -> None:
    """End what is not wanted: removed, surplus, or replaced by what is newer or elsewhere."""
    mine = draft.replicas[model.spec.id]
    if model.removing:
        for replica in mine:
            draft.end(StepKind.DRAIN, replica, f"{model.spec.name} is removed")
        return
    good, old = split(draft, model)
    target = draft.target(model)
    surplus = _least_missed(draft, (replica for replica in good if replica.state in WANTED_STATES))
    for replica in surplus[: max(0, len(surplus) - target.replicas)]:
        draft.end(StepKind.SCALE_DOWN, replica, f"{target.reason}: {target.replicas} of {len(surplus)} stay")
    _replace(draft, model, good, old)
    for replica in mine:
        if replica.state is ReplicaState.DRAINED:
            draft.end(StepKind.STOP, replica, "it is drained")


def split(draft: Draft, model: ModelRecord) -> tuple[list[ReplicaRecord], list[ReplicaRecord]]:
    """A model's replicas that may stay, and those another must take the place of: outdated, or on a draining node."""
    good: list[ReplicaRecord] = []
    old: list[ReplicaRecord] = []
    for replica in draft.replicas[model.spec.id]:
        outdated = replica.spec_version != model.spec_version
        (old if outdated or draft.on_draining(replica) else good).append(replica)
    return good, old


def _least_missed(draft: Draft, replicas: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Not yet serving first, then what works on the least, then the youngest."""

    def missed(replica: ReplicaRecord) -> tuple[bool, float, float, str]:
        return (replica.state is ReplicaState.SERVING, load_at(replica, draft.now), -replica.since, replica.id)

    return sorted(replicas, key=missed)


def _replace(draft: Draft, model: ModelRecord, good: list[ReplicaRecord], old: list[ReplicaRecord]) -> None:
    """End old replicas, as many as the rollout allows: what serves in all must not fall below the wanted number."""
    rollout, wanted = model.spec.rollout, draft.target(model).replicas
    standing = [replica for replica in old if replica.state in WANTED_STATES]
    serving = _least_missed(draft, (replica for replica in standing if replica.state is ReplicaState.SERVING))
    for replica in standing:
        if replica.state is not ReplicaState.SERVING:
            draft.end(StepKind.STOP, replica, _why_old(draft, model, replica))
    for replica in serving:
        if draft.on_draining(replica) and _deadline_passed(draft, replica):
            draft.end(StepKind.DRAIN, replica, f"the deadline of the drain of {', '.join(replica.nodes)} passed")
    staying = sum(replica.state is ReplicaState.SERVING and replica.id not in draft.acted for replica in good)
    left = [replica for replica in serving if replica.id not in draft.acted]
    spare = staying + len(left) - max(0, wanted - rollout.max_unavailable)
    for replica in left[: max(0, spare)]:
        draft.end(StepKind.DRAIN, replica, _why_old(draft, model, replica))


def _why_old(draft: Draft, model: ModelRecord, replica: ReplicaRecord) -> str:
    if replica.spec_version != model.spec_version:
        return f"version {model.spec_version} of the spec replaces version {replica.spec_version}"
    return f"{', '.join(replica.nodes)} drains"


def _deadline_passed(draft: Draft, replica: ReplicaRecord) -> bool:
    nodes = (draft.state.nodes[name] for name in replica.nodes if name in draft.state.nodes)
    return any(node.state is NodeState.DRAINING and node.drain_until <= draft.now for node in nodes)


def _due_now(draft: Draft, model: ModelRecord, state: ReplicaState) -> Iterator[ReplicaRecord]:
    for replica in draft.replicas[model.spec.id]:
        due = _due(draft.state, replica)
        current = replica.state is state and replica.spec_version == model.spec_version
        if current and due is not None and due <= draft.now and replica.id not in draft.ended:
            yield replica


def _resume(draft: Draft, model: ModelRecord) -> None:
    """Start again what nobody acknowledged."""
    for replica in _due_now(draft, model, ReplicaState.PLACED):
        draft.add(StepKind.RESUME, replica, "its start was not acknowledged")


def _wants(draft: Draft, model: ModelRecord) -> Iterator[Want]:
    """What is to be placed: what failed and has waited, then what is missing.

    While a rollout is under way only within its surge, and not after it failed.
    """
    for replica in _due_now(draft, model, ReplicaState.FAILED):
        yield Want(StepKind.RESTART, model, replica.id, replica.failure.cause if replica.failure else "it failed")
    good, old = split(draft, model)
    target = draft.target(model)
    filled = sum(replica.state in WANTED_STATES and replica.id not in draft.ended for replica in good)
    outdated = [replica for replica in old if replica.spec_version != model.spec_version]
    standing = sum(replica.state is ReplicaState.SERVING and replica.id not in draft.ended for replica in outdated)
    if standing and any(replica.given_up for replica in good):
        return  # the new version fails: the old one goes on serving
    missing = target.replicas - filled
    if standing:
        missing = min(missing, target.replicas + model.spec.rollout.max_surge - filled - standing)
    those = f" of version {model.spec_version}" if outdated else " that may stay" if old else ""
    for offset in range(missing):
        name = f"{model.spec.id}-{model.next_ordinal + offset}"
        reason = f"{target.reason}, there are {filled + offset}{those}"
        yield Want(StepKind.SCALE_UP, model, name, reason)

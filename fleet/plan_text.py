"""A plan as a person reads it: one line a step, what it comes to beneath it, indented."""

from fleet.reasons import Reason
from fleet.render import COUNTED, size
from fleet.state import CPU, Decision, FleetState, Outcome, ReplicaState, ShardAssignment, Verdict
from fleet.steps import ENDS, Plan, Step, StepKind

INDENT = "  "

VICTIMS = frozenset({StepKind.EVICT, StepKind.PREEMPT})
"""Kinds whose reason says what they free."""


def plan_lines(plan: Plan, state: FleetState) -> list[str]:
    """All steps in their order, with a note beneath each; `state` is the one the plan was made from."""
    lines = _demand(plan, state)
    for step in plan.steps:
        lines += _step(step, state)
    return lines


def explained_lines(plan: Plan, state: FleetState) -> list[str]:
    """The same, with every node's answer beneath each step that places."""
    lines = _demand(plan, state)
    for step in plan.steps:
        lines += _step(step, state)
        if step.decision is not None:
            lines += [INDENT * 2 + verdict_line(verdict) for verdict in step.decision.verdicts]
    return lines


def step_line(step: Step, state: FleetState) -> str:
    """`scale up m-0 on n1: wanted 2, there are 0`."""
    where = _places(_shards(step, state))
    return f"{step.kind} {step.replica}{f' on {where}' if where else ''}: {step.reason}"


def step_note(step: Step, state: FleetState) -> str:
    """What a step comes to: the room it takes, or what it frees and how; why it cannot be done now."""
    if step.decision is not None:
        return _placed(step.decision) if step.decision.shards else f"waits: {step.decision.sentence}"
    if step.kind not in ENDS:
        return ""
    frees = f"frees {size(step.frees)}" if step.frees and step.kind not in VICTIMS else ""
    return ", ".join(part for part in (frees, _how_it_ends(step, state)) if part)


def verdict_line(verdict: Verdict) -> str:
    """`n1 fits, score 3.50: best_fit 0.50, …`, or `n2 refused: memory, need 2 GiB, free 1 GiB of 8 GiB`."""
    if verdict.outcome is Outcome.FITS:
        return f"{verdict.node} fits, score {verdict.score:.2f}: {score_parts(verdict)}"
    if verdict.outcome is Outcome.EXCLUDED:
        return f"{verdict.node} excluded: {verdict.reason}"
    if verdict.reason is Reason.GANG_INCOMPLETE:
        return f"{verdict.node} would fit, but {verdict.need} nodes must and only {verdict.free} do"
    if verdict.reason is Reason.GPU_COUNT:
        return f"{verdict.node} refused: {verdict.reason}, need {verdict.need}, there are {verdict.capacity}"
    need, free, capacity = (verdict_amount(verdict, count) for count in (verdict.need, verdict.free, verdict.capacity))
    total, others = f" of {capacity}" if verdict.capacity else "", held_by_others(verdict)
    return f"{verdict.node} refused: {verdict.reason}, need {need}, free {free}{total}{f', {others}' if others else ''}"


def held_by_others(verdict: Verdict) -> str:
    """`3 GiB held by pid 41 and others`; empty where nobody else holds anything."""
    who = f"pid {verdict.holder} and others" if verdict.holder else "others"
    return f"{size(verdict.foreign)} held by {who}" if verdict.foreign else ""


def score_parts(verdict: Verdict) -> str:
    """`best_fit 0.50, spread 1.00`: each part of a score by name."""
    return ", ".join(f"{name} {part:.2f}" for name, part in sorted(verdict.parts.items()))


def verdict_amount(verdict: Verdict, count: int) -> str:
    """A verdict's need, free or capacity: bytes, or a number of things where its reason counts those."""
    return str(count) if verdict.reason in COUNTED else size(count)


def _demand(plan: Plan, state: FleetState) -> list[str]:
    lines = []
    for name, replicas in sorted(plan.scaled.items()):
        model = state.models[name]
        before = model.scaled if model.scaled is not None else model.spec.replicas
        evicted = any(step.kind is StepKind.EVICT and step.model == name for step in plan.steps)
        why = "it gives its room away" if evicted else "by demand"
        lines.append(f"scale {model.spec.name}, {why}: {before} → {replicas} replicas")
    return lines


def _step(step: Step, state: FleetState) -> list[str]:
    note = step_note(step, state)
    return [step_line(step, state), *([INDENT + note] if note else [])]


def _shards(step: Step, state: FleetState) -> tuple[ShardAssignment, ...]:
    if step.decision is not None:
        return step.decision.shards
    record = state.replicas.get(step.replica)
    return record.shards if record is not None else ()


def _places(shards: tuple[ShardAssignment, ...]) -> str:
    places = []
    for shard in shards:
        gpus = ", ".join(share.uuid for share in shard.devices if share.uuid != CPU)
        places.append(f"{shard.node} ({gpus})" if gpus else shard.node)
    return ", ".join(places)


def _placed(decision: Decision) -> str:
    fitting = sum(verdict.outcome is Outcome.FITS for verdict in decision.verdicts)
    reserved = sum(share.memory for shard in decision.shards for share in shard.devices)
    return f"fits {fitting} of {len(decision.verdicts)} nodes, reserves {size(reserved)}"


def _how_it_ends(step: Step, state: FleetState) -> str:
    record = state.replicas.get(step.replica)
    if record is None or record.state is ReplicaState.FAILED:
        return "it holds nothing"
    if record.state is ReplicaState.DRAINED:
        return ""
    if step.at_once:
        return "at once: it does not serve yet"
    model = state.models.get(step.model)
    deadline = f", for {model.spec.drain_deadline_s:g} s at most" if model is not None else ""
    busy = f" ({record.in_flight} in flight)" if record.in_flight else ""
    return f"its requests{busy} may run out{deadline}"

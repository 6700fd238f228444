"""A pass, decided: its steps with their reasons, and what it relies on."""

from collections import Counter
from enum import StrEnum

from fleet.records import Record
from fleet.state import Decision, Outcome


class Cause(Record):
    """Why a pass is due; its `reconcile` span links to it."""

    sentence: str
    trace: str = ""
    """traceparent, empty where the cause has no span."""


class StepKind(StrEnum):
    """What a step does. The value is its span's name."""

    REAP = "reap"
    STOP = "stop replica"
    DRAIN = "drain"
    SCALE_DOWN = "scale down"
    RESTART = "restart"
    RESUME = "resume start"  # the pass that placed it died before it started the workflow
    SCALE_UP = "scale up"
    EVICT = "evict"
    PREEMPT = "preempt"


class Step(Record):
    """One act of a pass."""

    kind: StepKind
    reason: str
    model: str
    replica: str
    generation: int = 0
    """Of the replica it acts on; for one that is placed, the new one."""
    at_once: bool = False
    """For those that end a replica: stopped without a drain, because it does not serve."""
    frees: int = 0
    """Bytes a victim gives back, on all its devices."""
    lost: tuple[str, ...] = ()
    """Of a reap: which of the replica's nodes are gone. What runs of it on others is stopped."""
    decision: Decision | None = None
    """Where it goes, or why nowhere, for the kinds that place."""

    @property
    def places(self) -> bool:
        """Whether it starts a replica's workflow."""
        return self.kind is StepKind.RESUME or (self.decision is not None and bool(self.decision.shards))


class Plan(Record):
    """All steps of a pass, in their order."""

    steps: tuple[Step, ...] = ()
    scaled: dict[str, int] = {}
    """Models whose number of replicas by demand changes."""
    waits_over: tuple[str, ...] = ()
    """Models that waited for room and want none any more: a drain was taken back, or demand fell."""
    touched: dict[str, int] = {}
    """The version of each model, node and replica the plan relies on: `model/<id>`, `node/<id>`, `replica/<id>`."""

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to commit."""
        return not (self.steps or self.scaled or self.waits_over)


KEPT_OTHERS = 3
"""Verdicts kept beside the winners' when a placement is stored: who came closest."""

KEPT_MISSES = 20
"""Verdicts kept of a refusal; the sentence counts them all, and `ctl model explain` asks every node anew."""


def brief(plan: Plan, most: int) -> Plan:
    """The plan as it is stored and sent: at most `most` steps, each with few of its verdicts.

    A payload holds 2 MiB, and 2,000 placements on 1,000 nodes have two million verdicts. What is cut off is planned
    again by the next pass.
    """
    return plan.model_copy(update={"steps": tuple(_brief_step(step) for step in plan.steps[:most])})


def _brief_step(step: Step) -> Step:
    if step.decision is None:
        return step
    winners = {shard.node for shard in step.decision.shards}
    won = [verdict for verdict in step.decision.verdicts if verdict.node in winners]
    others = [verdict for verdict in step.decision.verdicts if verdict.node not in winners]
    counts: dict[str, int] = {}
    if winners:
        others.sort(key=lambda verdict: -verdict.score)
        kept = (*won, *others[:KEPT_OTHERS])
    else:
        # Nodes that were refused for too little come before those that were none from the start.
        others.sort(key=lambda verdict: (verdict.outcome is Outcome.EXCLUDED, verdict.need - verdict.free))
        kept = tuple(others[:KEPT_MISSES])
        if len(others) > len(kept):
            counts = dict(sorted(Counter(verdict.reason.value for verdict in others if verdict.reason).items()))
    update = {"verdicts": kept, "turned_down": counts}
    return step.model_copy(update={"decision": step.decision.model_copy(update=update)})


ENDS = frozenset({StepKind.STOP, StepKind.DRAIN, StepKind.SCALE_DOWN, StepKind.EVICT, StepKind.PREEMPT})
"""Kinds that end a replica."""

"""A pass, decided: its steps with their reasons, and what it relies on."""

from enum import StrEnum

from fleet.records import Record
from fleet.state import Decision


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
    touched: dict[str, int] = {}
    """The version of each model, node and replica the plan relies on: `model/<id>`, `node/<id>`, `replica/<id>`."""

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to commit."""
        return not self.steps and not self.scaled


ENDS = frozenset({StepKind.STOP, StepKind.DRAIN, StepKind.SCALE_DOWN, StepKind.EVICT, StepKind.PREEMPT})
"""Kinds that end a replica."""

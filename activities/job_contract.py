"""How a job stands and what it came to, as workflows, ctl and tests share it; all of it is in `activities.contract`."""

from enum import StrEnum

from fleet.reasons import Failure
from fleet.records import Record
from fleet.spec import JobKind, Task


class SmokeResult(Record):
    """What the engine answered, and how fast."""

    answer: str
    """Its text; of an embedding or a ranking, what it is: `an embedding of 768 numbers`."""
    seconds: float
    completion_tokens: int
    """Of an embedding or a ranking, those it read."""
    tokens_per_second: float
    task: Task = Task.GENERATE
    prompt_tokens: int = 0
    served_as: str = ""
    """The model that the engine says it is."""
    first_token_ns: int = 0
    """When the first token came, by the worker's clock; nanoseconds since the epoch."""
    first_token_s: float = 0.0
    """From the request to it."""


class StepState(StrEnum):
    """How far a job's step is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


STEPS = ("registry", "mirror", "check", "catalog", "placement", "smoke test")


class StepStatus(Record):
    """One row of a job's table. Times are seconds since the epoch, 0 while not reached."""

    name: str
    state: StepState = StepState.PENDING
    detail: str = ""
    progress: str = ""
    """How far it is while it runs: ctl reads that off heartbeats, a job does not know it."""
    started_at: float = 0.0
    ended_at: float = 0.0


class JobState(StrEnum):
    """How a job stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # Only ctl says these: such an end comes from Temporal's own doors, and the job is not told.
    TERMINATED = "terminated"
    TIMED_OUT = "timed_out"


class JobResult(Record):
    """What a job returns when it succeeds; a failed one raises an ApplicationError whose type is the reason."""

    model: str
    sentence: str
    endpoint: str = ""
    replicas: tuple[str, ...] = ()
    smoke_test: SmokeResult | None = None


class JobStatus(Record):
    """What `ctl model job` and the web UI show."""

    job: str
    kind: JobKind
    state: JobState
    repo: str = ""
    model: str = ""
    steps: tuple[StepStatus, ...]
    trace: str = ""
    """traceparent of the job's root span, empty while tracing is off."""
    trace_id: str = ""
    """For `ctl trace` and trace stores; empty where the trace is not recorded."""
    replicas: tuple[str, ...] = ()
    failure: Failure | None = None
    result: JobResult | None = None
    """What a job that is done came to."""

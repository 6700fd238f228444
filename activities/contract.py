"""Names and models that workflows, control activities, agents, ctl and tests share.

Each act is one name, one model in and one model out. Queues, timeouts and retries stand in `workflows/calls.py`.
An activity that fails for a named reason raises `fleet.reasons.StepError`; the plugin in `runtime/temporal.py`
turns it into an ApplicationError whose type is the reason.
"""

from enum import StrEnum
from typing import Literal

from fleet.fit import Estimate as Estimate
from fleet.fit import FitVerdict as FitVerdict
from fleet.planning import Plan, Step
from fleet.reasons import Failure
from fleet.records import Record, Typed
from fleet.spec import Engine, JobKind, JobRequest, ResolvedModel, ShardNeed, Weights
from fleet.state import DeviceShare, FleetState, Inventory, Policy, ShardAssignment

# -- queues and workflow ids ------------------------------------------------------------------------------------------

CONTROL_QUEUE = "llmgw"


def node_queue(node: str) -> str:
    """The queue only this node's agent polls."""
    return f"node/{node}"


def lease_queue(node: str, incarnation: str) -> str:
    """The queue only this agent process polls; its one activity is the node's lease."""
    return f"node/{node}/{incarnation}"


def fleet_id(cell: str) -> str:
    """Workflow id of a cell's Fleet."""
    return f"fleet/{cell}"


def reconcile_id(cell: str) -> str:
    """Workflow id of a cell's Reconcile; one runs at a time."""
    return f"reconcile/{cell}"


MAIN_CELL = "main"


def replica_id(replica: str, cell: str = MAIN_CELL) -> str:
    """Workflow id of a replica. Cells may share a namespace, so those beside the default one stand in the id."""
    return f"replica/{replica}" if cell == MAIN_CELL else f"replica/{cell}/{replica}"


def node_id(node: str) -> str:
    """Workflow id of a node."""
    return f"node/{node}"


# -- search attributes ------------------------------------------------------------------------------------------------

SEARCH_MODEL = "LlmgwModel"
SEARCH_NODE = "LlmgwNode"
SEARCH_STATE = "LlmgwState"
SEARCH_ATTRIBUTES = (SEARCH_MODEL, SEARCH_NODE, SEARCH_STATE)
"""All Keyword."""

# -- control activities, on CONTROL_QUEUE -----------------------------------------------------------------------------

RESOLVE_MODEL = "resolve_model"
MIRROR_MODEL = "mirror_model"
CHECK_FIT = "check_fit"
PLACE = "place"
SMOKE_TEST = "smoke_test"


class ResolveRequest(Record):
    """Which repo to resolve."""

    repo: str


class MirrorRequest(Record):
    """Which files to bring into the mirror."""

    resolved: ResolvedModel


class MirrorResult(Record):
    """What the mirror holds now."""

    outcome: Literal["already mirrored", "copied"]
    copied_bytes: int
    seconds: float
    weights: Weights
    """With every hash known."""


class CheckRequest(Record):
    """What to check against the fleet."""

    cell: str
    weights: Weights
    request: JobRequest


class CheckResult(Record):
    """The answer of the check, on the control plane's side."""

    verdict: FitVerdict
    sentence: str
    engine: Engine
    architecture: str
    context_length: int
    need: ShardNeed
    estimate: Estimate | None = None
    """None where the operator said the memory."""
    candidate: str = ""
    """A node to run the preflight on; empty where there is none just now."""


class PlaceRequest(Record):
    """One pass's question to the planner."""

    cell: str
    pass_id: str
    now: float
    """The pass's own time (Temporal's clock, seconds since the epoch), so that no worker's clock decides."""


class PassPlan(Record):
    """What the pass must carry out; already committed to Fleet."""

    steps: tuple[Step, ...]
    starts: dict[str, "StartShards"] = {}
    """For each replica that a step starts: what its workflow needs."""


class SmokeRequest(Record):
    """One completion on a serving replica."""

    endpoint: str
    model: str
    prompt: str = "Reply with one short sentence: what is the capital of France?"


class SmokeResult(Record):
    """What the engine answered, and how fast."""

    answer: str
    seconds: float
    completion_tokens: int
    tokens_per_second: float


# -- node activities, on node_queue -----------------------------------------------------------------------------------

PREFLIGHT = "preflight"
START_SHARD = "start_shard"
DRAIN_SHARD = "drain_shard"
STOP_SHARD = "stop_shard"
ATTEND = "attend"


class ShardRef(Record):
    """One shard of one generation of one replica."""

    replica: str
    generation: int
    rank: int = 0


class PreflightRequest(Record):
    """Can this node run one shard, once it is empty enough?"""

    engine: Engine
    need: ShardNeed
    weights: Weights


class PreflightResult(Record):
    """What the node found; None where nothing speaks against it."""

    failure: Failure | None = None
    free_memory: int
    free_disk: int
    engine_version: str = ""
    engine_installed: bool = False


class StartShard(Record):
    """Everything a node needs to start one shard."""

    shard: ShardRef
    model: str
    """The name clients use."""
    engine: Engine
    weights: Weights
    devices: tuple[DeviceShare, ...]
    """What is reserved for it: the "cpu" device, or GPUs by uuid."""
    gpus: int
    context_length: int
    concurrency: int
    args: tuple[str, ...]
    ready_deadline_s: float


class StartShards(Record):
    """The shards of one replica by rank, with their nodes: the input of its workflow's start."""

    model: str
    """The name clients use."""
    nodes: tuple[str, ...]
    assignments: tuple[ShardAssignment, ...]
    shards: tuple[StartShard, ...]
    drain_deadline_s: float


class StartPhase(StrEnum):
    """Where a start is; the heartbeat carries it."""

    INSTALL = "install engine"
    FETCH = "fetch weights"
    LAUNCH = "launch engine"
    WAIT = "wait for engine"


class StartProgress(Record):
    """The heartbeat of a start, shown by the web UI and by ctl."""

    phase: StartPhase
    done_bytes: int = 0
    total_bytes: int = 0


class StartedShard(Record):
    """A shard that serves."""

    shard: ShardRef
    node: str
    pid: int
    endpoint: str
    weights_outcome: str
    """local, peer, mirror or hub."""
    adopted: bool = False
    """It already ran: started by an earlier attempt, perhaps of an earlier agent."""


class StopShard(Record):
    """Stop one shard; stopping what is gone succeeds."""

    shard: ShardRef
    grace_s: float = 10.0
    """Between TERM and KILL."""


class StoppedShard(Record):
    """What the stop found."""

    was_running: bool
    killed: bool = False
    """It did not go within the grace."""


class DrainShard(Record):
    """Wait until the engine has no request in flight, or the deadline."""

    shard: ShardRef
    deadline_s: float


class DrainedShard(Record):
    """How the drain ended."""

    left_in_flight: int
    """0, unless the deadline came first. Unknown (the engine did not answer) counts as 0: it serves nobody."""
    seconds: float


class AttendRequest(Record):
    """The lease of one agent process."""

    node: str
    incarnation: str


# -- the node's door: updates on Node, called by its agent ------------------------------------------------------------

NODE_WORKFLOW = "Node"
JOIN = "join"
REPORT = "report"
LEAVE = "leave"


class LeaseTerms(Record):
    """How soon a silent agent is noticed, and how long it may take to come back."""

    heartbeat_timeout_s: float = 10.0
    """Heartbeats go out at 0.8 of it: 1,000 nodes are 125 a second, a tenth of a core of the embedded server."""
    grace_s: float = 20.0
    """From a closed lease to a lost node: a restart of the agent takes 2 s, a reboot is longer on purpose."""


class NodeInput(Record):
    """Input of the Node workflow."""

    node: str
    cell: str = "main"
    terms: LeaseTerms = LeaseTerms()
    incarnation: str = ""
    """Of the agent that held the lease before a continue-as-new; empty at first."""


class RunningShard(Record):
    """A shard that runs on the node when its agent joins."""

    shard: ShardRef
    pid: int
    endpoint: str
    ready: bool


class JoinRequest(Record):
    """An agent process introduces itself."""

    node: str
    incarnation: str
    inventory: Inventory
    shards: tuple[RunningShard, ...] = ()


class JoinAnswer(Record):
    """What Fleet claims of what runs; the agent stops the rest."""

    claimed: tuple[ShardRef, ...]
    generation: int | None = None
    """The last one Fleet has given out. One below what the node has seen is a new fleet, such as after a lost
    database: the node must not take its starts for old ones. None: unknown."""


class ShardHealth(StrEnum):
    """How a shard that served is now."""

    EXITED = "exited"
    UNHEALTHY = "unhealthy"


class ShardChange(Record):
    """One shard's change, as its agent saw it."""

    shard: ShardRef
    health: ShardHealth
    failure: Failure


class Report(Record):
    """What changed on a node since the last report."""

    node: str
    incarnation: str
    changes: tuple[ShardChange, ...] = ()
    inventory: Inventory | None = None
    """Only where it differs enough to matter to placement."""


class Reported(Record):
    """The report was taken."""


class Leave(Record):
    """An agent goes away on purpose; its engines are stopped."""

    node: str
    incarnation: str


STALE_INCARNATION = "stale_incarnation"
"""Error type of a report or leave by an agent whose lease is not the current one: join again."""

# -- Fleet ------------------------------------------------------------------------------------------------------------

FLEET_WORKFLOW = "Fleet"
RECONCILE_WORKFLOW = "Reconcile"
MODEL_JOB_WORKFLOW = "ModelJob"
REPLICA_WORKFLOW = "Replica"

# updates, for people
UPDATE_REMOVE = "remove"
UPDATE_SCALE = "scale"
UPDATE_CORDON = "cordon"
UPDATE_UNCORDON = "uncordon"
# signal, from worker.py at its start
SIGNAL_CONFIGURE = "configure"
# update, for the pass
UPDATE_COMMIT = "commit"
# queries
QUERY_SNAPSHOT = "snapshot"
QUERY_ROUTES = "routes"
QUERY_EXPLAIN = "explain"
# query of ModelJob
QUERY_STATUS = "status"


class NameArg(Typed):
    """Names one thing: a model, or a node."""

    name: str


class ScaleArg(Typed):
    """How many replicas a model should have."""

    name: str
    replicas: int


class Done(Record):
    """A change was taken; the sentence says what it was."""

    sentence: str


class CommitRequest(Record):
    """A plan to be made true, whole or not at all. `plan.touched` holds the versions it was made from."""

    pass_id: str
    plan: Plan


class CommitResult(Record):
    """Whether the plan was taken; its steps are then to be carried out."""

    accepted: bool
    moved: tuple[str, ...] = ()
    """What had changed since the plan's snapshot."""


class Route(Record):
    """Where a model's requests can go."""

    model: str
    """The name clients use."""
    endpoints: tuple[str, ...]
    """URLs of the replicas that serve; empty for a model that is in the catalog and has none ready."""
    waiting: str = ""
    """Why none is ready: `ModelRecord.waiting`, or empty."""


class Routes(Record):
    """All routes."""

    routes: tuple[Route, ...]


class Snapshot(Record):
    """Fleet's state as one payload."""

    state: FleetState
    committed_by: str = ""
    """The pass whose plan was committed last: a pass that was killed after its commit finds its plan here."""
    committed: Plan = Plan()


class ConfigureArg(Record):
    """The policy in server.yaml."""

    policy: Policy


# -- jobs -------------------------------------------------------------------------------------------------------------


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
    started_at: float = 0.0
    ended_at: float = 0.0


class JobState(StrEnum):
    """How a job stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


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
    replicas: tuple[str, ...] = ()
    failure: Failure | None = None


class JobResult(Record):
    """What a job returns when it succeeds; a failed one raises an ApplicationError whose type is the reason."""

    model: str
    sentence: str
    endpoint: str = ""
    replicas: tuple[str, ...] = ()
    smoke_test: SmokeResult | None = None

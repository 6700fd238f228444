"""Names and models that workflows, control activities, agents, ctl and tests share.

Each act is one name, one model in and one model out. Queues, timeouts and retries stand in `workflows/calls.py`.
An activity that fails for a named reason raises `fleet.reasons.StepError`; the plugin in `runtime/temporal.py`
turns it into an ApplicationError whose type is the reason.
"""

from typing import Annotated, Literal

from pydantic import Field

from activities.job_contract import STEPS as STEPS
from activities.job_contract import JobResult as JobResult
from activities.job_contract import JobState as JobState
from activities.job_contract import JobStatus as JobStatus
from activities.job_contract import SmokeResult as SmokeResult
from activities.job_contract import StepState as StepState
from activities.job_contract import StepStatus as StepStatus
from activities.node_contract import PreflightResult, StartShards
from fleet.check import CheckResult as CheckResult
from fleet.estimate import Estimate as Estimate
from fleet.fit import FitVerdict as FitVerdict
from fleet.job_queue import Waiting
from fleet.paper import CheckWish
from fleet.records import Record, Typed
from fleet.spec import Engine, JobRequest, ResolvedModel, Task, Weights
from fleet.state import FleetState, Policy
from fleet.steps import Cause, Plan, Step

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
SEARCH_TRACE = "LlmgwTrace"
SEARCH_ATTRIBUTES = (SEARCH_MODEL, SEARCH_NODE, SEARCH_STATE, SEARCH_TRACE)
"""All Keyword; Temporal has room for ten."""

# -- control activities, on CONTROL_QUEUE -----------------------------------------------------------------------------

RESOLVE_MODEL = "resolve_model"
MIRROR_MODEL = "mirror_model"
DISCARD_WEIGHTS = "discard_weights"
CHECK_FIT = "check_fit"
CHECK_REPO = "check_repo"
PLACE = "place"
SMOKE_TEST = "smoke_test"


class ResolveRequest(Record):
    """Which repo to resolve, and what is wanted of it: what no engine could do is refused before any byte moves."""

    repo: str
    engine: Engine | None = None
    args: tuple[str, ...] = ()
    trust_remote_code: bool = False
    token: str = ""
    """The name of the token that opens it; "" is the one of server.yaml's `hub.token_file`, or none."""
    cell: str = "main"
    """The fleet whose catalog and nodes are asked while the hub is away."""


class MirrorRequest(Record):
    """Which files to bring into the mirror."""

    resolved: ResolvedModel
    token: str = ""
    """As in `ResolveRequest`."""


class MirrorResult(Record):
    """What the mirror holds now."""

    outcome: Literal["already mirrored", "copied"]
    copied_bytes: int
    seconds: float
    weights: Weights
    """With every hash known."""
    peer_bytes: int = 0
    """Of those copied, what nodes gave because the hub was away."""


class CheckRequest(Record):
    """What to check against the fleet."""

    cell: str
    weights: Weights
    request: JobRequest
    silent: tuple[str, ...] = ()
    """Candidates that did not answer: others come first."""


class CheckRepoRequest(Record):
    """What to check of a repo whose files lie where they lie."""

    resolved: ResolvedModel
    wish: CheckWish


class CheckReport(Record):
    """What a `ModelCheck` returns."""

    model: str
    repo: str
    revision: str
    size: int
    """Bytes of all files."""
    check: CheckResult
    preflight: PreflightResult | None = None
    """What the candidate found on itself; None on paper, and where there is none."""
    sentence: str


class PlaceRequest(Record):
    """One pass's question to the planner."""

    cell: str
    pass_id: str
    now: float
    """The pass's own time (Temporal's clock, seconds since the epoch), so that no worker's clock decides."""


class PassPlan(Record):
    """What the pass must carry out; already committed to Fleet."""

    steps: tuple[Step, ...]
    starts: dict[str, StartShards] = {}
    """For each replica that a step starts: what its workflow needs."""
    causes: tuple[Cause, ...] = ()
    """What came after the pass was started and is in its plan too."""


class SmokeRequest(Record):
    """One completion on a serving replica."""

    endpoint: str
    model: str
    prompt: str = "Reply with one short sentence: what is the capital of France?"
    task: Task = Task.GENERATE


# -- Fleet ------------------------------------------------------------------------------------------------------------

FLEET_WORKFLOW = "Fleet"
RECONCILE_WORKFLOW = "Reconcile"
MODEL_JOB_WORKFLOW = "ModelJob"
MODEL_CHECK_WORKFLOW = "ModelCheck"
REPLICA_WORKFLOW = "Replica"

# updates, for people
UPDATE_REMOVE = "remove"
UPDATE_SCALE = "scale"
UPDATE_CORDON = "cordon"
UPDATE_UNCORDON = "uncordon"
UPDATE_DRAIN = "drain"
UPDATE_RETRY = "retry"
UPDATE_RELEASE_BRAKE = "release_brake"
# signal, from worker.py at its start
SIGNAL_CONFIGURE = "configure"
# signal, from a worker's round: a replica without its workflow
SIGNAL_ORPHANED = "orphaned"
# and a node without its
SIGNAL_DESERTED = "deserted"
# and a job that ended without leaving its queue
SIGNAL_JOB_ENDED = "job_ended"
# signal, from the gateway: somebody asks for a model that has no replica
SIGNAL_WANTED = "wanted"
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


class DrainArg(Typed):
    """A node to be emptied."""

    name: str
    deadline_s: Annotated[float, Field(ge=0)] = 600.0
    """After so long, what could not be moved is stopped: ten minutes are two loads of a large model."""


class Done(Record):
    """A change was taken; the sentence says what it was."""

    sentence: str


class CommitRequest(Record):
    """A plan to be made true, whole or not at all. `plan.touched` holds the versions it was made from."""

    pass_id: str
    plan: Plan
    more: bool = False
    """Whether steps were cut off that the next pass has to make."""


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
    barred: str = ""
    """Why no request can bring one, such as a start that was given up; empty where asking for it can help."""


ROUTES_STALE_S = 2.0
"""No gateway that can read the routes sends by ones older than this, and a drain lasts at least as long.

Gateways read them once a second in some milliseconds; a second more is room for a server that is busy."""


class Routes(Record):
    """All routes."""

    routes: tuple[Route, ...]


class Snapshot(Record):
    """Fleet's state as one payload."""

    state: FleetState
    now: float = 0.0
    """Fleet's clock: seconds of the epoch when it last did something. No deadline of its state lies between that and
    the true time, or it would have done something then."""
    committed_by: str = ""
    """The pass whose plan was committed last: a pass that was killed after its commit finds its plan here."""
    committed: Plan = Plan()
    queues: dict[str, tuple[Waiting, ...]] = {}
    """Model id → the jobs on it, the one that has its turn first."""
    causes: tuple[Cause, ...] = ()
    """Why the next pass is due, where one is."""


class Orphan(Record):
    """A replica whose workflow does not run."""

    replica: str
    generation: int


class Deserted(Record):
    """A node whose workflow does not run."""

    node: str
    incarnation: str


class JobEnded(Record):
    """A job that ended without a word to Fleet, because somebody terminated it."""

    job: str


class ConfigureArg(Record):
    """The policy in server.yaml."""

    policy: Policy

"""What workflows say to each other: signals with replies, because jobs, replicas and nodes come in numbers."""

from enum import StrEnum

from activities.node_contract import Rejoin, ShardChange, ShardRef, StartShards
from fleet.demand import LOADS_GAP_S
from fleet.facts import Load
from fleet.job_queue import Turn, Waiting
from fleet.reasons import Failure
from fleet.records import Record, Typed
from fleet.spec import JobKind, JobRequest, ModelSpec, Weights
from fleet.state import FleetState, Inventory, ReplicaState, ShardAssignment
from fleet.steps import Cause, Plan
from fleet.wishes import Applied

# -- to Fleet ---------------------------------------------------------------------------------------------------------

SIGNAL_NODE_JOINED = "node_joined"
SIGNAL_NODE_MEASURED = "node_measured"
SIGNAL_NODE_LOST = "node_lost"
SIGNAL_NODE_LOADS = "node_loads"
SIGNAL_REPLICA_CHANGED = "replica_changed"
SIGNAL_ASK = "ask"


class NodeJoined(Record):
    """An agent joined; Node waits for the `Welcome`."""

    node: str
    incarnation: str
    inventory: Inventory
    highest_generation: int = 0


class NodeMeasured(Record):
    """A node's inventory changed enough to matter."""

    node: str
    incarnation: str
    inventory: Inventory


class NodeLost(Record):
    """A node's lease ran out, or its agent left."""

    node: str
    incarnation: str
    cause: str
    left: bool = False
    """The agent said goodbye and stops its engines."""


class NodeLoads(Record):
    """How busy a node's replicas are."""

    node: str
    incarnation: str
    loads: tuple[Load, ...]


class AskKind(StrEnum):
    """What a job asks of Fleet."""

    APPLY = "apply"
    REMOVE = "remove"
    ABANDON = "abandon"  # a job that ends early takes back what it did to the catalog, and leaves its queue
    TURN = "turn"  # answered by `Turn`s, until it leaves
    LEAVE = "leave"  # the job has ended, and what it did stays
    KNOWN = "known"  # what was asked for when the model was applied last
    ROOM = "room"  # a failure where the model waits because no node has room


class Ask(Record):
    """A job's request; Fleet answers with an `Answer`, and from then on tells the job how the model is."""

    kind: AskKind
    job: str
    """Workflow id of the job."""
    spec: ModelSpec | None = None
    name: str = ""
    job_kind: JobKind = JobKind.SERVE


# -- from Fleet -------------------------------------------------------------------------------------------------------

SIGNAL_WELCOME = "welcome"
SIGNAL_ANSWER = "answer"
SIGNAL_MODEL_STATUS = "model_status"
SIGNAL_TURN = "turn"


class Claim(Record):
    """A shard Fleet wants on a node, and how far its replica should be."""

    shard: ShardRef
    state: ReplicaState


class Welcome(Record):
    """Fleet's answer to a join."""

    incarnation: str
    claims: tuple[Claim, ...]
    loads_gap_s: float = LOADS_GAP_S
    """As in `JoinAnswer`."""


class Answer(Record):
    """Fleet's answer to an ask."""

    applied: Applied | None = None
    model: str = ""
    """The model's id."""
    failure: Failure | None = None
    known: JobRequest | None = None
    """What is in the catalog, as a request."""
    weights: Weights | None = None
    """Of a model that is being removed."""
    shared_with: tuple[str, ...] = ()
    """Names of other models with the same weights."""


class Phase(StrEnum):
    """How a model is, for a job that waits."""

    WAITING = "waiting"  # something is not placed yet
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    REMOVED = "removed"


class Wait(StrEnum):
    """What a model that does not serve yet waits for, where that is no start under way: the name of its span."""

    DECISION = "wait for pass"  # the next pass decides, or carries out what it decided
    ROOM = "wait for room"
    BACKOFF = "backoff"  # a failed start is tried again after a while
    STOP = "wait for stop"  # of what is not wanted any more


class ReplicaBrief(Record):
    """A replica in a model's status."""

    replica: str
    nodes: tuple[str, ...]
    state: ReplicaState
    endpoint: str = ""
    trace: str = ""


class ModelStatus(Record):
    """How a model is."""

    model: str
    phase: Phase
    sentence: str
    waits_for: Wait | None = None
    told_at: float = 0.0
    """When one of its replicas told something last, seconds since the epoch."""
    replicas: tuple[ReplicaBrief, ...] = ()
    failure: Failure | None = None


# -- to Replica -------------------------------------------------------------------------------------------------------

SIGNAL_SHARD_CHANGED = "shard_changed"
SIGNAL_DRAIN = "drain"
SIGNAL_STOP = "stop"
SIGNAL_NODE_GONE = "node_gone"
SIGNAL_SUPERSEDED = "superseded"


class ToReplica(Record):
    """A command to one generation of a replica; others ignore it."""

    generation: int
    reason: str = ""
    lost: tuple[str, ...] = ()
    """Nodes that are gone, where that is what it tells."""


class ShardNews(Record):
    """What a node saw of a shard."""

    change: ShardChange


class Action(StrEnum):
    """What a Replica workflow is started for."""

    START = "start"
    STOP = "stop"  # the workflow that started it is gone; its shards may still run


class ReplicaInput(Record):
    """One generation of one replica."""

    cell: str
    replica: str
    generation: int
    model: str
    """The model's name."""
    action: Action = Action.START
    shards: tuple[ShardAssignment, ...]
    start: StartShards | None = None
    """What to start; None for STOP."""
    decided_at_ns: int = 0
    """When placement decided: the start of its `start replica` span."""


# -- Fleet's and Reconcile's own inputs -------------------------------------------------------------------------------


class Message(Record):
    """A signal that waits to be sent."""

    workflow: str
    signal: str
    welcome: Welcome | None = None
    answer: Answer | None = None
    status: ModelStatus | None = None
    turn: Turn | None = None
    rejoin: Rejoin | None = None


class FleetInput(Record):
    """What one run of Fleet takes over from the last."""

    cell: str = "main"
    state: FleetState = FleetState()
    outbox: tuple[Message, ...] = ()
    watchers: dict[str, str] = {}
    """Job workflow id → model id."""
    queues: dict[str, tuple[Waiting, ...]] = {}
    """Model id → the jobs on it, in their order."""
    causes: tuple[Cause, ...] = ()
    committed_by: str = ""
    committed: Plan = Plan()


class ReconcileInput(Typed):
    """One pass; a person may start one, so what is misspelt is refused."""

    cell: str = "main"
    causes: tuple[Cause, ...] = ()
    at: float = 0.0
    """Fleet's time when it started the pass: no pass plans with an earlier one, whatever server's clock it has."""

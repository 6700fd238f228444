"""Names and models between the control plane and a node's agent: its activities, and its updates on Node.

Queues and workflow ids stand in `activities/contract.py`.
"""

from enum import StrEnum

from fleet.demand import LOADS_GAP_S
from fleet.facts import Load
from fleet.peaks import Measured
from fleet.reasons import Failure
from fleet.records import Record
from fleet.spec import Engine, ShardNeed, Weights
from fleet.state import DeviceShare, Inventory, ShardAssignment

# -- node activities, on node_queue -----------------------------------------------------------------------------------

PREFLIGHT = "preflight"
PREPARE_SHARD = "prepare_shard"
RESERVE_PORT = "reserve_port"
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
    """Of RAM, or on the fullest of the GPUs it would take."""
    free_disk: int
    engine_version: str = ""
    engine_installed: bool = False


class GangPlace(Record):
    """Where the shards of one replica are, and where they meet."""

    nodes: tuple[str, ...]
    """By rank."""
    address: str
    """Of rank 0's node."""
    port: int
    """Reserved there."""


class StartShard(Record):
    """Everything a node needs to start one shard."""

    shard: ShardRef
    model: str
    """The name clients use."""
    engine: Engine
    weights: Weights
    peers: tuple[str, ...] = ()
    """Where other nodes serve these files, or soon will; the best first."""
    devices: tuple[DeviceShare, ...]
    """What is reserved for it: the "cpu" device, or GPUs by uuid."""
    gpus: int
    context_length: int
    concurrency: int
    args: tuple[str, ...]
    trust_remote_code: bool = False
    ready_deadline_s: float
    pipeline_parallel: int = 1
    """Stages the layers are spread over."""
    gang: GangPlace | None = None
    """None: this shard is the whole replica."""
    asked_ns: int = 0
    """When its workflow asked, by the server's clock; nanoseconds since the epoch."""


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
    RENDEZVOUS = "rendezvous"
    LAUNCH = "launch engine"
    WAIT = "wait for engine"


class StartProgress(Record):
    """The heartbeat of a start, shown by the web UI and by ctl."""

    phase: StartPhase
    detail: str = ""
    """What of it is being done, in a few words."""
    done_bytes: int = 0
    total_bytes: int = 0
    began_ns: int = 0
    """When this attempt began, and when this was said, by the node's clock: what a trace knows of an attempt whose
    agent was killed."""
    said_ns: int = 0


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
    measured: Measured | None = None
    """What it was seen to take, where it has answered requests already."""
    ended_ns: int = 0
    """When the start was done, by the node's clock; nanoseconds since the epoch, 0 where the node makes no spans."""


class PreparedShard(Record):
    """A node that has engine and weights for a shard of a gang."""

    shard: ShardRef
    node: str
    weights_outcome: str
    ended_ns: int = 0
    """As of a start."""


class ReservePort(Record):
    """Keep a port for the rendezvous of a gang: rank 0's node chooses one, and then every other node keeps it too."""

    shard: ShardRef
    avoid: tuple[int, ...] = ()
    """Ports that turned out to be taken."""
    port: int = 0
    """Of the other ranks: the one that rank 0's node chose."""
    asked_ns: int = 0
    """As of a start."""


class PortHolder(Record):
    """Who has a port that a gang would have met at."""

    port: int
    pid: int = 0
    """0 where that cannot be seen: it runs as somebody else, or has gone."""
    name: str = ""
    """What the process calls itself."""


class ReservedPort(Record):
    """Where the gang meets. A node that was told a port and finds it among `taken` has kept none."""

    address: str
    port: int
    taken: tuple[int, ...] = ()
    """Ports before it in turn that were taken."""
    holder: PortHolder | None = None
    """Who has the first port that was found taken here; None where none was."""
    ended_ns: int = 0
    """As of a start."""


class StopShard(Record):
    """Stop one shard; stopping what is gone succeeds."""

    shard: ShardRef
    grace_s: float = 10.0
    """Between TERM and KILL."""
    asked_ns: int = 0
    """As of a start."""


class StoppedShard(Record):
    """What the stop found."""

    was_running: bool
    killed: bool = False
    """It did not go within the grace."""
    held: str = ""
    """Who still holds what, where not all is back: the node is in quarantine. Empty where all is."""
    measured: Measured | None = None
    """The most it was seen to take, where it answered requests."""
    ended_ns: int = 0
    """As of a start."""


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
SIGNAL_REJOIN = "rejoin"


class Rejoin(Record):
    """Fleet began anew, so the agent must introduce itself again."""

    cell: str = ""
    """Whose Fleet; nodes of other cells do not mind."""


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
    machine: str = ""
    """Of that agent."""
    wanted: bool = False
    """Whether its lease is to be opened again at once."""


class ShardHealth(StrEnum):
    """How a shard that served is now."""

    EXITED = "exited"
    UNHEALTHY = "unhealthy"


class ShardChange(Record):
    """One shard's change, as its agent saw it."""

    shard: ShardRef
    health: ShardHealth
    failure: Failure


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
    changes: tuple[ShardChange, ...] = ()
    """What ended while no agent was there, or since, and was not reported yet; it is reported all the same."""
    machine: str = ""
    """Tells two machines with one node name apart: while one holds the lease the other is refused."""
    highest_generation: int = 0
    """The last one this node has been asked for: Fleet counts on from there, even one that begins anew."""
    cell: str = ""
    terms: LeaseTerms | None = None
    """As agent.yaml says now; empty: as at the node's first join."""


class JoinAnswer(Record):
    """What Fleet claims of what runs; the agent stops the rest."""

    claimed: tuple[ShardRef, ...]
    returned: bool = True
    """Whether the agent comes back: until this join another process held the lease, or nobody."""
    loads_gap_s: float = LOADS_GAP_S
    """Seconds between two reports of its loads, at least, in a fleet of this size."""


class Report(Record):
    """What changed on a node since the last report."""

    node: str
    incarnation: str
    changes: tuple[ShardChange, ...] = ()
    loads: tuple[Load, ...] = ()
    """How busy the node's replicas are, where that changed enough to matter or a while has passed."""
    inventory: Inventory | None = None
    """Only where it differs enough to matter to placement."""


class Reported(Record):
    """The report was taken."""


class Leave(Record):
    """An agent goes away on purpose; its engines are stopped."""

    node: str
    incarnation: str


NAME_TAKEN = "name_taken"
"""Error type of a join under the name of a node that another machine holds."""

STALE_INCARNATION = "stale_incarnation"
"""Error type of a report or leave by an agent whose lease is not the current one: join again."""

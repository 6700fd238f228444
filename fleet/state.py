"""What the fleet knows: nodes as they reported themselves, models as they were asked for, replicas in between.

Everything is frozen; `fleet/wishes.py`, `facts.py` and `commits.py` make the next state from the last. Times are
seconds since the epoch, memory and disk are bytes.
"""

from enum import StrEnum

from pydantic import Field

from fleet.peaks import Measured
from fleet.reasons import Failure, Reason
from fleet.records import Record
from fleet.spec import Engine, ModelSpec

CPU = "cpu"
"""The uuid of the device that stands for a node's RAM."""


class Device(Record):
    """Memory an engine can be placed on: one GPU, or the node's RAM (`uuid` = "cpu")."""

    uuid: str
    model: str = ""
    total: int
    foreign: int = 0
    """Bytes held by processes that are not ours, as measured."""
    holders: tuple[int, ...] = ()
    """Pids of those processes, the largest first, where they are known."""

    @property
    def usable(self) -> int:
        """What engines of ours may hold in all."""
        return max(0, self.total - max(0, self.foreign))


class EngineOffer(Record):
    """An engine a node has, or can install."""

    engine: Engine
    version: str
    installed: bool


class Inventory(Record):
    """What a node has, as its agent measured it."""

    address: str
    """Host or IP on which the node's engines are reached."""
    devices: tuple[Device, ...]
    engines: tuple[EngineOffer, ...] = ()
    cpus: int = 1
    disk_total: int = 0
    disk_free: int = 0
    """Free bytes where the node keeps weights."""
    weights: tuple[str, ...] = ()
    """`Weights.model_id` of the models whose files are here whole and verified."""
    labels: dict[str, str] = {}
    roles: tuple[str, ...] = ()
    trust_remote_code: bool = False
    """Whether its engines may run Python that came with a model."""
    peer_url: str = ""
    """Where the node serves the files of its weights to other nodes; empty: it serves none."""
    version: str = ""
    """The agent's own version."""
    quarantine: str = ""
    """Why the node itself takes nothing new, such as memory that did not come back; empty where it does."""
    notes: tuple[str, ...] = ()
    """What an operator should know of the node, a sentence each."""
    logs: str = ""
    """The directory of its engines' logs, on the node."""


class NodeState(StrEnum):
    """Whether the fleet may use a node."""

    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"  # cordoned, and what runs there goes elsewhere
    LOST = "lost"


class NodeRecord(Record):
    """A member of the fleet."""

    id: str
    state: NodeState
    incarnation: str
    """The agent process that joined last."""
    inventory: Inventory
    since: float
    """When the state began."""
    cause: str = ""
    """Why the state is what it is, where it is not `ready`."""
    drain_until: float = 0.0
    """When what still runs on a draining node is stopped without waiting for its replacement."""
    trace: str = ""
    """W3C traceparent of who asked for its last drain; empty where that has none."""
    closed: NodeState = NodeState.READY
    """What it was when it was lost: a cordon or drain outlives that."""
    left: bool = False
    """Lost because its agent said goodbye: its engines are stopped."""
    pardoned: str = ""
    """The quarantine that an operator lifted: it does not count; another one does."""
    version: int = 0
    """Counts the changes that matter to a plan; a plan on an older one is refused."""

    @property
    def quarantine(self) -> str:
        """Why nothing new is placed here although its state may be ready; empty where that is not so."""
        return "" if self.inventory.quarantine == self.pardoned else self.inventory.quarantine


class DeviceShare(Record):
    """Memory reserved on one device."""

    uuid: str
    memory: int


class ShardAssignment(Record):
    """Where one shard runs."""

    rank: int
    node: str
    devices: tuple[DeviceShare, ...]
    weights: str = ""
    """`Weights.model_id` of what it reads; empty where an older fleet placed it."""
    disk: int = 0
    """Bytes of those weights: kept free on the node until it reports to hold them."""


class ReplicaState(StrEnum):
    """A replica's life. Only PLACED to STOPPING hold memory."""

    PLACED = "placed"  # reserved; its workflow is being started
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # takes no new requests; those in flight run out
    DRAINED = "drained"
    STOPPING = "stopping"
    FAILED = "failed"  # holds nothing; restarted after its backoff, or given up


HOLDING = frozenset(set(ReplicaState) - {ReplicaState.FAILED})
"""States in which a replica's reservation counts."""


class ReplicaRecord(Record):
    """One copy of a model. The id is a slot of the model; each start in it is a new generation."""

    id: str
    model: str
    """The model's id."""
    spec_version: int
    generation: int
    state: ReplicaState
    since: float
    shards: tuple[ShardAssignment, ...] = ()
    endpoint: str = ""
    """URL of the engine, while it serves."""
    failure: Failure | None = None
    """Its last failure, kept while it serves again: why it was restarted."""
    failures: tuple[float, ...] = ()
    """When it failed, within the restart policy's window."""
    given_up: bool = False
    """Not restarted until the spec changes or somebody says retry."""
    told_at: float = 0.0
    """When its workflow said how it is; `since` is when Fleet heard it."""
    trace: str = ""
    """W3C traceparent of its `start replica` span, empty while tracing is off."""
    load: float = 0.0
    """Requests in flight, smoothed."""
    loaded_at: float = 0.0
    """When `load` was measured."""
    in_flight: int = 0
    """Requests in flight as its node told last; it tells when that changes."""
    cut_short: int = 0
    """Requests that were still in flight when the deadline of its drain came."""
    version: int = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Its nodes by rank."""
        return tuple(shard.node for shard in self.shards)


class Outcome(StrEnum):
    """What placement thought of one node."""

    FITS = "fits"
    REFUSED = "refused"  # could run it, not now: too little of something
    EXCLUDED = "excluded"  # not a candidate: cordoned, lost, lacks the engine


class Verdict(Record):
    """One node's answer to one placement, for winners too."""

    node: str
    outcome: Outcome
    reason: Reason | None = None
    need: int = 0
    free: int = 0
    capacity: int = 0
    foreign: int = 0
    """Bytes that processes that are not ours hold on the device that was too small."""
    holder: int = 0
    """The pid that holds most of them; 0 where it is not known."""
    score: float = 0.0
    """The sum of `parts`; the highest wins."""
    parts: dict[str, float] = Field(default_factory=dict)  # a plain {} is copied deeply for each of a million verdicts
    """Each part of the score by name, 0 to 1."""


class Decision(Record):
    """One placement, with the answer of every node."""

    model: str
    replica: str
    shards: tuple[ShardAssignment, ...]
    """Empty where nothing fits."""
    verdicts: tuple[Verdict, ...]
    sentence: str
    turned_down: dict[str, int] = {}
    """Nodes by the reason of their refusal, where not all verdicts are kept."""


class ModelRecord(Record):
    """A model in the catalog."""

    spec: ModelSpec
    spec_version: int
    applied_at: float
    removing: bool = False
    created_by: str = ""
    """Workflow id of the job that put it into the catalog; empty once anybody else asked for it too."""
    changed_by: str = ""
    """Workflow id of the job that made the spec what it is, while that job runs."""
    previous: ModelSpec | None = None
    """The spec before that, which comes back where the job is cancelled."""
    previous_version: int = 0
    waiting: str = ""
    """The sentence of the last placement that found no room; empty when nothing waits."""
    decision: Decision | None = None
    """The last placement."""
    next_ordinal: int = 0
    scaled: int | None = None
    """Replicas by demand; None where the spec has no scaling."""
    scaled_at: float = 0.0
    used_at: float = 0.0
    """When it last had a request in flight, or was asked for."""
    version: int = 0


class RestartPolicy(Record):
    """How a replica that failed is tried again."""

    attempts: int = 5
    """Failures within the window after which it is given up."""
    window_s: float = 600.0
    base_s: float = 1.0
    """The first wait; each further one is twice as long, with up to a quarter of jitter."""
    cap_s: float = 60.0


class Policy(Record):
    """The fleet's settings, from server.yaml."""

    restart: RestartPolicy = RestartPolicy()
    unstarted_after_s: float = 30.0
    """A placed replica whose workflow did not report within this is started again (the pass may have died)."""
    mass_loss_share: float = 0.5
    """When more than this share of the nodes is lost, nothing is reaped: rather the network or Temporal is ill."""
    mass_loss_window_s: float = 300.0
    """Losses within so long of each other count together."""


class ForcedEnd(Record):
    """A drain whose deadline came first: what was in flight then was cut short."""

    replica: str
    model: str
    """The model's id; it may be gone."""
    nodes: tuple[str, ...]
    requests: int
    at: float


class FleetState(Record):
    """All of it."""

    cell: str = "main"
    policy: Policy = Policy()
    generation: int = 0
    """The last generation given out. One counter for the whole fleet: a slot that is removed and made again
    never repeats a generation, so an old report or an old engine cannot be taken for the new one."""
    brake: str = ""
    """Why nothing is reaped just now; empty: lost nodes are reaped."""
    models: dict[str, ModelRecord] = {}
    nodes: dict[str, NodeRecord] = {}
    replicas: dict[str, ReplicaRecord] = {}
    peaks: tuple[Measured, ...] = ()
    """The memory that earlier runs took, the one told last at the end."""
    forced: tuple[ForcedEnd, ...] = ()
    """The last drains that ended by force, the latest last: their replicas' records are gone soon after."""

    def with_model(self, model: ModelRecord) -> "FleetState":
        """The same with this model."""
        return self.model_copy(update={"models": {**self.models, model.spec.id: model}})

    def with_node(self, node: NodeRecord) -> "FleetState":
        """The same with this node."""
        return self.model_copy(update={"nodes": {**self.nodes, node.id: node}})

    def with_replica(self, replica: ReplicaRecord) -> "FleetState":
        """The same with this replica."""
        return self.model_copy(update={"replicas": {**self.replicas, replica.id: replica}})

    def without_replica(self, replica: str) -> "FleetState":
        """The same without this replica; with the last one of a model that is being removed, the model goes too."""
        model = self.replicas[replica].model
        left = {key: record for key, record in self.replicas.items() if key != replica}
        return self.model_copy(update={"replicas": left}).forget_removed(model)

    def forget_removed(self, model: str) -> "FleetState":
        """The same without this model, if it is being removed and nothing of it is left."""
        record = self.models.get(model)
        if record is None or not record.removing or any(r.model == model for r in self.replicas.values()):
            return self
        return self.model_copy(update={"models": {key: m for key, m in self.models.items() if key != model}})

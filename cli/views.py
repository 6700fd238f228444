"""The stable shapes behind every listing's `--json`, and how they come from the fleet's state: pure."""

from datetime import UTC, datetime
from enum import StrEnum

from fleet import standing
from fleet.reasons import Failure
from fleet.records import Record
from fleet.render import forced_sentence, offer_text, size
from fleet.room import room_of
from fleet.state import HOLDING, FleetState, ModelRecord, NodeRecord, NodeState, ReplicaRecord, ReplicaState
from fleet.trace_ids import trace_id_of


class FailureView(Record):
    """Why something failed."""

    reason: str
    detail: str
    node: str
    sentence: str
    """What a person reads: cause, place and advice."""


class DeviceView(Record):
    """Memory engines can be placed on, in bytes."""

    uuid: str
    model: str
    total: int
    foreign: int
    """Held by processes that are not llmgw's."""
    free: int
    """Neither foreign nor reserved."""


class NodeView(Record):
    """`ctl node list --json`: a list of these. Times are seconds since the epoch, sizes are bytes."""

    id: str
    state: str
    """ready, quarantined, cordoned, draining or lost."""
    since: float
    drain_until: float
    """When what still runs on a draining node is stopped; 0 where it does not drain."""
    cause: str
    address: str
    cpus: int
    devices: tuple[DeviceView, ...]
    engines: tuple[str, ...]
    disk_free: int
    disk_total: int
    replicas: tuple[str, ...]
    labels: dict[str, str]
    roles: tuple[str, ...]
    version: str


class ModelState(StrEnum):
    """How a model is as a whole."""

    SERVING = "serving"
    STARTING = "starting"
    WAITING = "waiting"
    """Nothing fits: see `waiting`."""
    FAILED = "failed"
    """A replica was given up: see `failure`."""
    REMOVING = "removing"
    STOPPED = "stopped"
    """No replica is wanted."""


class ScalingView(Record):
    """Between which numbers a model scales by demand."""

    min: int
    max: int


class ModelView(Record):
    """`ctl model list --json`: a list of these."""

    name: str
    id: str
    state: ModelState
    repo: str
    engine: str
    replicas: int
    """Wanted: what the operator said, or what demand made of it."""
    scaling: ScalingView | None
    """None where the number is the operator's."""
    serving: int
    """Of the current version of the spec."""
    serving_old: int
    """Of versions before it: they serve on until it does."""
    priority: int
    context_length: int
    memory: int
    """Bytes one shard needs."""
    gpus: int
    weights_bytes: int
    spec_version: int
    waiting: str
    failure: FailureView | None


class ReplicaView(Record):
    """`ctl replica list --json`: a list of these."""

    id: str
    model: str
    """The name clients use."""
    state: str
    generation: int
    nodes: tuple[str, ...]
    endpoint: str
    load: float
    """Requests in flight, smoothed."""
    since: float
    failure: FailureView | None
    given_up: bool
    trace: str
    """traceparent of its start."""
    trace_id: str
    """For `ctl trace` and trace stores; empty where the trace is not recorded."""
    doing: str = ""
    """While it starts: what its node is doing."""


class JobView(Record):
    """`ctl model jobs --json`: a list of these, the newest first."""

    id: str
    state: str
    """running, done, failed or cancelled; also terminated and timed_out, which only Temporal's own doors make."""
    model: str
    started_at: float
    ended_at: float
    """0 while it runs."""
    trace_id: str = ""
    """Empty where the trace is not recorded."""


class ProcessView(Record):
    """One process of the embedded system."""

    name: str
    state: str
    """running, died or stopped."""
    pid: int
    """0 where it never ran."""
    log: str


class WaitingView(Record):
    """A model that waits, and why."""

    model: str
    why: str


class ForcedEndView(Record):
    """A drain whose deadline came while requests were in flight."""

    replica: str
    model: str
    """Its id."""
    nodes: tuple[str, ...]
    requests: int
    at: float
    sentence: str


class StatusView(Record):
    """`ctl status --json`."""

    home: str
    processes: tuple[ProcessView, ...]
    temporal: str
    """The address ctl uses; empty where there is none."""
    ui: str
    """Empty where the embedded system is down."""
    gateway: str
    problem: str
    """Why the fleet could not be asked; empty where it answered."""
    brake: str
    """Why lost nodes are not reaped just now; empty where they are."""
    nodes: tuple[NodeView, ...]
    models: tuple[ModelView, ...]
    replicas: tuple[ReplicaView, ...]
    waiting: tuple[WaitingView, ...]
    forced: tuple[ForcedEndView, ...]
    """The last drains that ended by force, the latest last."""

    @property
    def died(self) -> tuple[ProcessView, ...]:
        """Parts that were started and are dead."""
        return tuple(process for process in self.processes if process.state == "died")

    @property
    def broken(self) -> bool:
        """Whether something that should run does not; a system that nobody started is not broken."""
        return bool(self.died or (self.problem and self.temporal))


def node_views(state: FleetState) -> tuple[NodeView, ...]:
    """All nodes by name."""
    room = room_of(state)
    return tuple(
        NodeView(
            id=node.id,
            state="quarantined" if node.state is NodeState.READY and node.quarantine else node.state,
            since=node.since,
            drain_until=node.drain_until if node.state is NodeState.DRAINING else 0.0,
            cause="; ".join(filter(None, (node.cause, node.quarantine, *node.inventory.notes))),
            address=node.inventory.address,
            cpus=node.inventory.cpus,
            devices=tuple(
                DeviceView(
                    uuid=device.uuid,
                    model=device.model,
                    total=device.total,
                    foreign=device.foreign,
                    free=max(0, room.free(node.id, device.uuid)),
                )
                for device in node.inventory.devices
            ),
            engines=tuple(offer_text(offer) for offer in node.inventory.engines),
            disk_free=node.inventory.disk_free,
            disk_total=node.inventory.disk_total,
            replicas=_replicas_on(state, node),
            labels=node.inventory.labels,
            roles=node.inventory.roles,
            version=node.inventory.version,
        )
        for node in sorted(state.nodes.values(), key=lambda node: node.id)
    )


def model_views(state: FleetState) -> tuple[ModelView, ...]:
    """All models by name."""
    return tuple(_model_view(state, model) for model in sorted(state.models.values(), key=lambda m: m.spec.name))


def replica_views(state: FleetState) -> tuple[ReplicaView, ...]:
    """All replicas by id."""
    names = {model.spec.id: model.spec.name for model in state.models.values()}
    return tuple(
        ReplicaView(
            id=replica.id,
            model=names.get(replica.model, replica.model),
            state=replica.state,
            generation=replica.generation,
            nodes=replica.nodes,
            endpoint=replica.endpoint,
            load=replica.load,
            since=replica.since,
            failure=failure_view(replica.failure, replica.id, names.get(replica.model, "")),
            given_up=replica.given_up,
            trace=replica.trace,
            trace_id=trace_id_of(replica.trace),
        )
        for replica in sorted(state.replicas.values(), key=lambda replica: replica.id)
    )


def waiting_views(models: tuple[ModelView, ...]) -> tuple[WaitingView, ...]:
    """The models that wait or were given up."""
    return tuple(
        WaitingView(model=model.name, why=model.waiting or (model.failure.sentence if model.failure else ""))
        for model in models
        if model.state in (ModelState.WAITING, ModelState.FAILED)
    )


def forced_views(state: FleetState) -> tuple[ForcedEndView, ...]:
    """The last drains that ended by force, the latest last."""
    return tuple(ForcedEndView(**forced.model_dump(), sentence=forced_sentence(forced)) for forced in state.forced)


def failure_view(failure: Failure | None, replica: str = "", model: str = "") -> FailureView | None:
    """With its sentence, for what it is known to be about."""
    if failure is None:
        return None
    sentence = failure.told(replica=replica, model=model)
    return FailureView(reason=failure.reason, detail=failure.detail, node=failure.node, sentence=sentence)


NODE_COLUMNS = ("NODE", "STATE", "ADDRESS", "MEMORY FREE", "DISK FREE", "ENGINES", "REPLICAS", "CAUSE")
MODEL_COLUMNS = ("MODEL", "STATE", "SERVING", "ENGINE", "MEMORY", "CONTEXT", "REPO", "WHY")
REPLICA_COLUMNS = ("REPLICA", "MODEL", "STATE", "GENERATION", "LOAD", "NODES", "ENDPOINT", "WHY")


def node_row(view: NodeView) -> tuple[str, ...]:
    """For NODE_COLUMNS."""
    memory = ", ".join(f"{device.uuid} {size(device.free)} of {size(device.total)}" for device in view.devices)
    return (
        view.id,
        f"{view.state} until {clock(view.drain_until)}" if view.drain_until else view.state,
        view.address,
        memory,
        size(view.disk_free),
        ", ".join(view.engines),
        ", ".join(view.replicas),
        view.cause,
    )


def model_row(view: ModelView) -> tuple[str, ...]:
    """For MODEL_COLUMNS."""
    old = f" +{view.serving_old} old" if view.serving_old else ""
    return (
        view.name,
        view.state,
        f"{view.serving}/{view.replicas}{old}{f' ({view.scaling.min}..{view.scaling.max})' if view.scaling else ''}",
        view.engine,
        f"{view.gpus} x {size(view.memory)}" if view.gpus else size(view.memory),
        str(view.context_length),
        view.repo,
        view.waiting or (view.failure.sentence if view.failure else ""),
    )


def replica_row(view: ReplicaView) -> tuple[str, ...]:
    """For REPLICA_COLUMNS."""
    why = view.failure.sentence if view.failure else ""
    if why and view.state != ReplicaState.FAILED:
        why = f"restarted after: {why}"  # it is no trouble of now
    return (
        view.id,
        view.model,
        f"{view.state} ({view.doing})" if view.doing else view.state,
        str(view.generation),
        f"{view.load:.1f}",
        ", ".join(view.nodes),
        view.endpoint,
        why,
    )


def clock(moment: float) -> str:
    """A time of today's or tomorrow's, as the operator's watch shows it."""
    return f"{datetime.fromtimestamp(moment, UTC).astimezone():%H:%M:%S}"


def _model_view(state: FleetState, model: ModelRecord) -> ModelView:
    failure = standing.given_up(state, model)
    missing = standing.missing(state, model)
    wanted = standing.wanted(state, model)
    scaling = model.spec.scaling
    return ModelView(
        name=model.spec.name,
        id=model.spec.id,
        state=_model_state(model, wanted, missing, failure),
        repo=model.spec.repo,
        engine=model.spec.engine,
        replicas=wanted,
        scaling=ScalingView(min=scaling.min, max=scaling.max) if scaling is not None else None,
        serving=sum(_serves(replica, model) for replica in state.replicas.values()),
        serving_old=sum(_serves(replica, model, old=True) for replica in state.replicas.values()),
        priority=model.spec.priority,
        context_length=model.spec.context_length,
        memory=model.spec.need.memory,
        gpus=model.spec.need.gpus,
        weights_bytes=model.spec.weights.size,
        spec_version=model.spec_version,
        waiting=model.waiting,
        failure=failure_view(failure, _given_up(state, model, failure), model.spec.name),
    )


def _given_up(state: FleetState, model: ModelRecord, failure: Failure | None) -> str:
    """The replica whose failure it is."""
    mine = (replica for replica in state.replicas.values() if replica.model == model.spec.id and replica.given_up)
    return next((replica.id for replica in mine if replica.failure is failure), "")


def _serves(replica: ReplicaRecord, model: ModelRecord, *, old: bool = False) -> bool:
    asked = replica.model == model.spec.id and (replica.spec_version < model.spec_version) is old
    return asked and replica.state is ReplicaState.SERVING


def _model_state(model: ModelRecord, wanted: int, missing: int, failure: Failure | None) -> ModelState:
    if model.removing:
        return ModelState.REMOVING
    if wanted == 0:
        return ModelState.STOPPED
    if missing == 0:
        return ModelState.SERVING
    if failure is not None:
        return ModelState.FAILED
    return ModelState.WAITING if model.waiting else ModelState.STARTING


def _replicas_on(state: FleetState, node: NodeRecord) -> tuple[str, ...]:
    return tuple(
        replica.id
        for replica in sorted(state.replicas.values(), key=lambda replica: replica.id)
        if replica.state in HOLDING and node.id in replica.nodes
    )

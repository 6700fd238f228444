"""The stable shapes behind every listing's `--json`, and how they come from the fleet's state: pure."""

from enum import StrEnum

from fleet import standing
from fleet.reasons import Failure
from fleet.records import Record
from fleet.render import size
from fleet.room import room_of
from fleet.state import HOLDING, FleetState, ModelRecord, NodeRecord, ReplicaRecord, ReplicaState


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
    """ready, cordoned or lost."""
    since: float
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


class ModelView(Record):
    """`ctl model list --json`: a list of these."""

    name: str
    id: str
    state: ModelState
    repo: str
    engine: str
    replicas: int
    """Wanted."""
    serving: int
    """Of the current version of the spec."""
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
    since: float
    failure: FailureView | None
    given_up: bool
    trace: str


class JobView(Record):
    """`ctl model jobs --json`: a list of these, the newest first."""

    id: str
    state: str
    """running, done, failed or cancelled; also terminated and timed_out, which only Temporal's own doors make."""
    model: str
    started_at: float
    ended_at: float
    """0 while it runs."""


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
    nodes: tuple[NodeView, ...]
    models: tuple[ModelView, ...]
    waiting: tuple[WaitingView, ...]


def node_views(state: FleetState) -> tuple[NodeView, ...]:
    """All nodes by name."""
    room = room_of(state)
    return tuple(
        NodeView(
            id=node.id,
            state=node.state,
            since=node.since,
            cause=node.cause,
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
            engines=tuple(f"{offer.engine} {offer.version}".strip() for offer in node.inventory.engines),
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
    return tuple(
        ReplicaView(
            id=replica.id,
            model=state.models[replica.model].spec.name if replica.model in state.models else replica.model,
            state=replica.state,
            generation=replica.generation,
            nodes=replica.nodes,
            endpoint=replica.endpoint,
            since=replica.since,
            failure=failure_view(replica.failure),
            given_up=replica.given_up,
            trace=replica.trace,
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


def failure_view(failure: Failure | None) -> FailureView | None:
    """With its sentence."""
    if failure is None:
        return None
    return FailureView(reason=failure.reason, detail=failure.detail, node=failure.node, sentence=failure.sentence)


NODE_COLUMNS = ("NODE", "STATE", "ADDRESS", "MEMORY FREE", "DISK FREE", "ENGINES", "REPLICAS", "CAUSE")
MODEL_COLUMNS = ("MODEL", "STATE", "SERVING", "ENGINE", "MEMORY", "CONTEXT", "REPO", "WHY")
REPLICA_COLUMNS = ("REPLICA", "MODEL", "STATE", "GENERATION", "NODES", "ENDPOINT", "WHY")


def node_row(view: NodeView) -> tuple[str, ...]:
    """For NODE_COLUMNS."""
    memory = ", ".join(f"{device.uuid} {size(device.free)} of {size(device.total)}" for device in view.devices)
    return (
        view.id,
        view.state,
        view.address,
        memory,
        size(view.disk_free),
        ", ".join(view.engines),
        ", ".join(view.replicas),
        view.cause,
    )


def model_row(view: ModelView) -> tuple[str, ...]:
    """For MODEL_COLUMNS."""
    return (
        view.name,
        view.state,
        f"{view.serving}/{view.replicas}",
        view.engine,
        f"{view.gpus} x {size(view.memory)}" if view.gpus else size(view.memory),
        str(view.context_length),
        view.repo,
        view.waiting or (view.failure.sentence if view.failure else ""),
    )


def replica_row(view: ReplicaView) -> tuple[str, ...]:
    """For REPLICA_COLUMNS."""
    why = view.failure.sentence if view.failure else ""
    return (view.id, view.model, view.state, str(view.generation), ", ".join(view.nodes), view.endpoint, why)


def _model_view(state: FleetState, model: ModelRecord) -> ModelView:
    failure = standing.given_up(state, model)
    missing = standing.missing(state, model)
    return ModelView(
        name=model.spec.name,
        id=model.spec.id,
        state=_model_state(model, missing, failure),
        repo=model.spec.repo,
        engine=model.spec.engine,
        replicas=model.spec.replicas,
        serving=sum(_serves(replica, model) for replica in state.replicas.values()),
        priority=model.spec.priority,
        context_length=model.spec.context_length,
        memory=model.spec.need.memory,
        gpus=model.spec.need.gpus,
        weights_bytes=model.spec.weights.size,
        spec_version=model.spec_version,
        waiting=model.waiting,
        failure=failure_view(failure),
    )


def _serves(replica: ReplicaRecord, model: ModelRecord) -> bool:
    current = replica.model == model.spec.id and replica.spec_version == model.spec_version
    return current and replica.state is ReplicaState.SERVING


def _model_state(model: ModelRecord, missing: int, failure: Failure | None) -> ModelState:
    if model.removing:
        return ModelState.REMOVING
    if model.spec.replicas == 0:
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

"""How the fleet's state changes: each function takes the state and one fact, and returns the next state.

These are the only places that make a new `FleetState`. A change that is refused raises `RefusedError` and has no
effect. Facts about an older generation or incarnation are ignored: the state comes back as it was.
"""

from fleet.placement import free_of
from fleet.planning import Plan, Step, StepKind
from fleet.reasons import Failure, Reason, RefusedError
from fleet.records import Record
from fleet.spec import ModelSpec, ShardNeed
from fleet.state import (
    HOLDING,
    FleetState,
    Inventory,
    ModelRecord,
    NodeRecord,
    NodeState,
    Policy,
    ReplicaRecord,
    ReplicaState,
)


class Applied(Record):
    """What applying a spec came to."""

    created: bool
    changed: bool
    spec_version: int


class ReplicaEvent(Record):
    """What a Replica tells Fleet. STOPPED is `state=None`: it holds nothing and its record goes."""

    replica: str
    generation: int
    state: ReplicaState | None
    endpoint: str = ""
    failure: Failure | None = None
    trace: str = ""
    """traceparent of `start replica`, with STARTING."""


# -- what people ask for ----------------------------------------------------------------------------------------------


def apply(state: FleetState, spec: ModelSpec, now: float) -> tuple[FleetState, Applied]:
    """Put a spec into the catalog. The same spec again changes nothing but clears a given-up start: it is a retry."""
    old = state.models.get(spec.id)
    if old is None:
        record = ModelRecord(spec=spec, spec_version=1, applied_at=now, version=1)
        return _with_model(state, record), Applied(created=True, changed=True, spec_version=1)
    if old.removing:
        raise RefusedError(Reason.BAD_INPUT, f"model {spec.name} is being removed: apply it again when it is gone")
    if old.spec.name != spec.name:
        raise RefusedError(Reason.BAD_INPUT, f"model {spec.name} has the id of {old.spec.name}: choose another name")
    # Only what an engine was started with makes a new version; counts and priorities change in place.
    restarts = _started_with(old.spec) != _started_with(spec)
    changed = old.spec != spec
    record = old.model_copy(
        update={
            "spec": spec,
            "spec_version": old.spec_version + restarts,
            "applied_at": now if changed else old.applied_at,
            "waiting": "" if changed else old.waiting,
            "version": old.version + 1,
        }
    )
    state = retry(_with_model(state, record), spec.name, now)
    return state, Applied(created=False, changed=changed, spec_version=record.spec_version)


def retry(state: FleetState, name: str, now: float) -> FleetState:
    """Try again what was given up."""
    model = find_model(state, name)
    for replica in state.replicas.values():
        if replica.model == model.spec.id and replica.given_up:
            update = {"given_up": False, "failures": (), "since": now, "version": replica.version + 1}
            state = _with_replica(state, replica.model_copy(update=update))
    return state


def remove(state: FleetState, name: str) -> FleetState:
    """Take a model out of the catalog; its replicas are drained and stopped, then the record goes."""
    model = find_model(state, name)
    record = model.model_copy(update={"removing": True, "waiting": "", "version": model.version + 1})
    return _forget_removed(_with_model(state, record), model.spec.id)


def scale(state: FleetState, name: str, replicas: int) -> FleetState:
    """Change how many replicas a model should have."""
    model = find_model(state, name)
    if model.removing:
        raise RefusedError(Reason.BAD_INPUT, f"model {name} is being removed")
    if not 0 <= replicas <= 1000:
        raise RefusedError(Reason.BAD_INPUT, f"replicas: {replicas} is not between 0 and 1000")
    spec = model.spec.model_copy(update={"replicas": replicas})
    return _with_model(state, model.model_copy(update={"spec": spec, "waiting": "", "version": model.version + 1}))


def cordon(state: FleetState, name: str, cordoned: bool, now: float) -> FleetState:
    """Keep new replicas off a node, or let them on again. What runs there stays."""
    node = find_node(state, name)
    if node.state is NodeState.LOST:
        raise RefusedError(Reason.BAD_INPUT, f"node {name} is lost: bring its agent back first")
    target = NodeState.CORDONED if cordoned else NodeState.READY
    if node.state is target:
        return state
    cause = "cordoned by an operator" if cordoned else ""
    update = {"state": target, "since": now, "cause": cause, "version": node.version + 1}
    return _with_node(state, node.model_copy(update=update))


def configure(state: FleetState, policy: Policy) -> FleetState:
    """Take the settings of server.yaml."""
    return state.model_copy(update={"policy": policy})


def find_model(state: FleetState, name: str) -> ModelRecord:
    """The model with this name or id; RefusedError names those there are."""
    for model in state.models.values():
        if name in (model.spec.name, model.spec.id):
            return model
    known = ", ".join(sorted(model.spec.name for model in state.models.values())) or "none"
    raise RefusedError(Reason.BAD_INPUT, f"no model is named {name}; there are: {known}")


def find_node(state: FleetState, name: str) -> NodeRecord:
    """The node with this id; RefusedError names those there are."""
    if name in state.nodes:
        return state.nodes[name]
    raise RefusedError(
        Reason.BAD_INPUT, f"no node is named {name}; there are: {', '.join(sorted(state.nodes)) or 'none'}"
    )


# -- what nodes and replicas tell -------------------------------------------------------------------------------------


def node_joined(state: FleetState, node: str, incarnation: str, inventory: Inventory, now: float) -> FleetState:
    """An agent introduced itself; a cordon outlives its restart."""
    old = state.nodes.get(node)
    kept = old is not None and old.state is NodeState.CORDONED
    record = NodeRecord(
        id=node,
        state=NodeState.CORDONED if kept else NodeState.READY,
        incarnation=incarnation,
        inventory=inventory,
        since=old.since if old is not None and old.state is not NodeState.LOST else now,
        cause=old.cause if old is not None and kept else "",
        version=old.version + 1 if old is not None else 1,
    )
    return _with_node(state, record)


def claims(state: FleetState, node: str) -> tuple[ReplicaRecord, ...]:
    """The replicas that should have a shard on this node."""
    return tuple(replica for replica in state.replicas.values() if replica.state in HOLDING and node in replica.nodes)


def node_measured(state: FleetState, node: str, incarnation: str, inventory: Inventory) -> FleetState:
    """A node measured itself anew."""
    old = state.nodes.get(node)
    if old is None or old.incarnation != incarnation or old.inventory == inventory:
        return state
    return _with_node(state, old.model_copy(update={"inventory": inventory, "version": old.version + 1}))


def node_lost(state: FleetState, node: str, incarnation: str, cause: str, now: float) -> FleetState:
    """A node's lease ran out and nobody took it up, or its agent left."""
    old = state.nodes.get(node)
    if old is None or old.incarnation != incarnation or old.state is NodeState.LOST:
        return state
    update = {"state": NodeState.LOST, "since": now, "cause": cause, "version": old.version + 1}
    return _with_node(state, old.model_copy(update=update))


def replica_changed(state: FleetState, event: ReplicaEvent, now: float) -> FleetState:
    """A replica's workflow told where it is."""
    old = state.replicas.get(event.replica)
    if old is None or old.generation != event.generation:
        return state
    if event.state is None:
        return _forget_removed(_without_replica(state, old.id), old.model)
    if old.state is ReplicaState.FAILED:
        return state  # reaped meanwhile: it holds nothing, and only a new generation may
    if event.state is ReplicaState.FAILED:
        return _failed(state, old, event.failure or Failure(reason=Reason.INTERNAL, detail="no cause was given"), now)
    if not _follows(old.state, event.state):
        return state
    update = {
        "state": event.state,
        "since": now,
        "endpoint": event.endpoint if event.state is ReplicaState.SERVING else old.endpoint,
        "trace": event.trace or old.trace,
        "version": old.version + 1,
    }
    return _with_replica(state, old.model_copy(update=update))


def _follows(old: ReplicaState, new: ReplicaState) -> bool:
    # DRAINING and STOPPING are decided here and told to the replica, so a late STARTING or SERVING changes nothing.
    return {
        ReplicaState.STARTING: old is ReplicaState.PLACED,
        ReplicaState.SERVING: old in (ReplicaState.PLACED, ReplicaState.STARTING),
        ReplicaState.DRAINED: old is ReplicaState.DRAINING,
    }.get(new, False)


def _failed(state: FleetState, replica: ReplicaRecord, failure: Failure, now: float) -> FleetState:
    policy = state.policy.restart
    model = state.models.get(replica.model)
    going = replica.state in (ReplicaState.DRAINING, ReplicaState.DRAINED, ReplicaState.STOPPING)
    if model is None or model.removing or going:
        return _forget_removed(_without_replica(state, replica.id), replica.model)
    blameless = failure.reason is Reason.NODE_LOST
    recent = tuple(moment for moment in replica.failures if moment > now - policy.window_s)
    failures = recent if blameless else (*recent, now)
    update = {
        "state": ReplicaState.FAILED,
        "since": now,
        "shards": (),
        "endpoint": "",
        "failure": failure,
        "failures": failures,
        "given_up": not blameless and (not failure.retryable or len(failures) >= policy.attempts),
        "version": replica.version + 1,
    }
    return _with_replica(state, replica.model_copy(update=update))


# -- what a pass decided ----------------------------------------------------------------------------------------------


def moved(state: FleetState, plan: Plan) -> tuple[str, ...]:
    """What the plan relies on and has changed since; empty where the plan may be committed."""
    now = {
        **{f"model/{key}": model.version for key, model in state.models.items()},
        **{f"node/{key}": node.version for key, node in state.nodes.items()},
        **{f"replica/{key}": replica.version for key, replica in state.replicas.items()},
    }
    return tuple(key for key, version in plan.touched.items() if now.get(key) != version)


def commit(state: FleetState, plan: Plan, now: float) -> FleetState:
    """Make a plan true: reservations are made here, before anything starts. `moved` must have said nothing."""
    for step in plan.steps:
        state = _commit_step(state, step, now)
    return state


def _commit_step(state: FleetState, step: Step, now: float) -> FleetState:
    if step.decision is not None:
        return _commit_placement(state, step, now)
    replica = state.replicas[step.replica]
    if step.kind is StepKind.REAP:
        return _failed(state, replica, Failure(reason=Reason.NODE_LOST, detail=step.reason), now)
    if step.kind is StepKind.STOP and replica.state is ReplicaState.FAILED:
        return _forget_removed(_without_replica(state, replica.id), replica.model)
    target = {
        StepKind.DRAIN: ReplicaState.DRAINING,
        StepKind.SCALE_DOWN: ReplicaState.DRAINING,
        StepKind.STOP: ReplicaState.STOPPING,
        StepKind.RESUME: ReplicaState.PLACED,
    }[step.kind]
    # `RESUME` moves `since`, and with it the next deadline.
    update = {"state": target, "since": now, "version": replica.version + 1}
    return _with_replica(state, replica.model_copy(update=update))


def _commit_placement(state: FleetState, step: Step, now: float) -> FleetState:
    model = state.models[step.model]
    decision = step.decision
    if decision is None or not decision.shards:
        waiting = decision.sentence if decision is not None else ""
        update = {"waiting": waiting, "decision": decision, "version": model.version + 1}
        return _with_model(state, model.model_copy(update=update))
    old = state.replicas.get(step.replica)
    record = ReplicaRecord(
        id=step.replica,
        model=step.model,
        spec_version=model.spec_version,
        generation=step.generation,
        state=ReplicaState.PLACED,
        since=now,
        shards=decision.shards,
        failure=old.failure if old is not None else None,
        failures=old.failures if old is not None else (),
        version=old.version + 1 if old is not None else 1,
    )
    ordinal = model.next_ordinal + (old is None)
    update = {"waiting": "", "decision": decision, "next_ordinal": ordinal, "version": model.version + 1}
    state = _with_replica(_with_model(state, model.model_copy(update=update)), record)
    return state.model_copy(update={"generation": max(state.generation, step.generation)})


# -- what follows from a state ----------------------------------------------------------------------------------------


def missing(state: FleetState, model: ModelRecord) -> int:
    """How many more replicas of the current version must serve."""
    serving = sum(
        replica.model == model.spec.id
        and replica.spec_version == model.spec_version
        and replica.state is ReplicaState.SERVING
        for replica in state.replicas.values()
    )
    return max(0, model.spec.replicas - serving)


def given_up(state: FleetState, model: ModelRecord) -> Failure | None:
    """The failure that keeps the model from being whole, if one was given up."""
    for replica in state.replicas.values():
        if replica.model == model.spec.id and replica.spec_version == model.spec_version and replica.given_up:
            return replica.failure
    return None


def best_free(state: FleetState, need: ShardNeed) -> tuple[int, str]:
    """The most memory one device of a usable node has free for such a shard now, and that node ("" without one)."""
    free = free_of(state)
    best = (0, "")
    for node in state.nodes.values():
        if node.state is not NodeState.READY:
            continue
        for device in node.inventory.devices:
            if (device.uuid == "cpu") == (need.gpus == 0):
                best = max(best, (free.of(node.id, device.uuid), node.id))
    return best


def over_capacity(state: FleetState) -> tuple[str, ...]:
    """Devices on which more is reserved than they hold, as `node/uuid`: empty in every state we make."""
    reserved: dict[tuple[str, str], int] = {}
    for replica in state.replicas.values():
        if replica.state in HOLDING:
            for shard in replica.shards:
                for share in shard.devices:
                    reserved[shard.node, share.uuid] = reserved.get((shard.node, share.uuid), 0) + share.memory
    totals = {
        (node.id, device.uuid): device.total for node in state.nodes.values() for device in node.inventory.devices
    }
    return tuple(f"{node}/{uuid}" for (node, uuid), taken in reserved.items() if taken > totals.get((node, uuid), 0))


# -- small copies -----------------------------------------------------------------------------------------------------


def _with_model(state: FleetState, model: ModelRecord) -> FleetState:
    return state.model_copy(update={"models": {**state.models, model.spec.id: model}})


def _with_node(state: FleetState, node: NodeRecord) -> FleetState:
    return state.model_copy(update={"nodes": {**state.nodes, node.id: node}})


def _with_replica(state: FleetState, replica: ReplicaRecord) -> FleetState:
    return state.model_copy(update={"replicas": {**state.replicas, replica.id: replica}})


def _without_replica(state: FleetState, replica: str) -> FleetState:
    return state.model_copy(update={"replicas": {key: r for key, r in state.replicas.items() if key != replica}})


def _forget_removed(state: FleetState, model: str) -> FleetState:
    record = state.models.get(model)
    if record is None or not record.removing or any(r.model == model for r in state.replicas.values()):
        return state
    return state.model_copy(update={"models": {key: m for key, m in state.models.items() if key != model}})


def _started_with(spec: ModelSpec) -> tuple[object, ...]:
    return (spec.engine, spec.weights, spec.need, spec.context_length, spec.concurrency, spec.args)

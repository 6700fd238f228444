"""What people ask of the fleet: each function takes the state and one wish, and returns the next state.

A wish that cannot be granted raises `RefusedError`, and nothing has changed.
"""

from fleet import standing
from fleet.reasons import Reason, RefusedError
from fleet.records import Record
from fleet.spec import ModelSpec
from fleet.state import FleetState, ModelRecord, NodeRecord, NodeState, Policy, ReplicaState


class Applied(Record):
    """What applying a spec came to."""

    created: bool
    changed: bool
    spec_version: int
    restarts: bool = False
    """Whether the change makes a new version, which replaces what serves."""
    difference: str = ""
    """What changed in place: `replicas 3 → 1`."""


def apply(state: FleetState, spec: ModelSpec, now: float, *, job: str = "") -> tuple[FleetState, Applied]:
    """Put a spec into the catalog. The same spec again changes nothing but clears a given-up start: it is a retry.

    `job` is who asks; a job that is cancelled may take back what it created, as long as nobody else wants it.
    """
    old = state.models.get(spec.id)
    if old is None:
        record = ModelRecord(spec=spec, spec_version=1, applied_at=now, version=1, created_by=job)
        return state.with_model(record), Applied(created=True, changed=True, spec_version=1)
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
            "created_by": old.created_by if job == old.created_by else "",
            **_before(old, spec, job),
            "scaled": old.scaled if spec.scaling is not None else None,
            "version": old.version + 1,
        }
    )
    state = retry(state.with_model(record), spec.name, now)
    return state, Applied(
        created=False,
        changed=changed,
        spec_version=record.spec_version,
        restarts=restarts,
        difference=_difference(old.spec, spec),
    )


def _before(old: ModelRecord, spec: ModelSpec, job: str) -> dict[str, object]:
    """What a record keeps of the spec that a job replaces, so that it can be brought back."""
    if job and old.changed_by == job:
        return {}  # the job asks again: what was before it stays what it was
    if not job or old.spec == spec:
        return {"changed_by": "", "previous": None, "previous_version": 0}
    return {"changed_by": job, "previous": old.spec, "previous_version": old.spec_version}


def _difference(old: ModelSpec, new: ModelSpec) -> str:
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in ("replicas", "priority", "scaling", "rollout"))
    said = [
        f"{name} {before} → {after}" if isinstance(after, int) else name
        for name, before, after in pairs
        if before != after
    ]
    return ", ".join(said) or "details"


def retry(state: FleetState, name: str, now: float) -> FleetState:
    """Try again what was given up."""
    model = find_model(state, name)
    for replica in state.replicas.values():
        if replica.model == model.spec.id and replica.given_up:
            update = {"given_up": False, "failures": (), "since": now, "version": replica.version + 1}
            state = state.with_replica(replica.model_copy(update=update))
    return state


def remove(state: FleetState, name: str) -> FleetState:
    """Take a model out of the catalog; its replicas are drained and stopped, then the record goes."""
    model = find_model(state, name)
    record = model.model_copy(update={"removing": True, "waiting": "", "version": model.version + 1})
    return state.with_model(record).forget_removed(model.spec.id)


def abandon(state: FleetState, name: str, job: str) -> FleetState:
    """A job that ends early takes back what it did: a model it created goes, one it changed is as it was before.

    Unless that is whole already: then it serves, and stays. Nor where somebody else asked for it since.
    """
    model = next((m for m in state.models.values() if name in (m.spec.name, m.spec.id)), None)
    if model is None or model.removing:
        return state
    if model.created_by == job:
        serves = any(r.model == model.spec.id and r.state is ReplicaState.SERVING for r in state.replicas.values())
        return state if serves else remove(state, name)
    if model.changed_by != job or model.previous is None:
        return state
    return settle(state, name, job) if standing.missing(state, model) == 0 else _restored(state, model, model.previous)


def settle(state: FleetState, name: str, job: str) -> FleetState:
    """A job has ended, and what it made of the model stays: what was before is forgotten."""
    model = next((m for m in state.models.values() if name in (m.spec.name, m.spec.id)), None)
    if model is None or model.changed_by != job:
        return state
    return state.with_model(model.model_copy(update={"changed_by": "", "previous": None, "previous_version": 0}))


def _restored(state: FleetState, model: ModelRecord, spec: ModelSpec) -> FleetState:
    """The model with the spec it had. What runs by that spec goes on: it gets the new version's number, so that no
    number ever means two specs."""
    version = model.spec_version + (model.spec_version != model.previous_version)
    for replica in state.replicas.values():
        if replica.model == spec.id and replica.spec_version == model.previous_version:
            update = {"spec_version": version, "version": replica.version + 1}
            state = state.with_replica(replica.model_copy(update=update))
    record = model.model_copy(
        update={
            "spec": spec,
            "spec_version": version,
            "waiting": "",
            "changed_by": "",
            "previous": None,
            "previous_version": 0,
            "version": model.version + 1,
        }
    )
    return state.with_model(record)


def scale(state: FleetState, name: str, replicas: int) -> FleetState:
    """Change how many replicas a model should have."""
    model = find_model(state, name)
    if model.removing:
        raise RefusedError(Reason.BAD_INPUT, f"model {name} is being removed")
    if not 0 <= replicas <= 1000:
        raise RefusedError(Reason.BAD_INPUT, f"replicas: {replicas} is not between 0 and 1000")
    request = model.spec.request.model_copy(update={"replicas": replicas}) if model.spec.request is not None else None
    spec = model.spec.model_copy(update={"replicas": replicas, "request": request})
    return state.with_model(model.model_copy(update={"spec": spec, "waiting": "", "version": model.version + 1}))


def check_scale(state: FleetState, name: str) -> None:
    """Refuse a number of replicas for a model that demand gives one: it would be gone with the next request."""
    model = find_model(state, name)
    scaling = model.spec.scaling
    if scaling is not None:
        raise RefusedError(
            Reason.BAD_INPUT,
            f"model {model.spec.name} scales by demand, between {scaling.min} and {scaling.max} replicas: "
            "serve it again with other --min and --max, or change its `scaling` in the file of models",
        )


def cordon(state: FleetState, name: str, cordoned: bool, now: float) -> FleetState:
    """Keep new replicas off a node, or let them on again, also where it put itself in quarantine."""
    node = find_node(state, name)
    if node.state is NodeState.LOST:
        raise RefusedError(Reason.BAD_INPUT, f"node {name} is lost: bring its agent back first")
    target = NodeState.CORDONED if cordoned else NodeState.READY
    pardoned = node.pardoned if cordoned else node.inventory.quarantine
    if node.state is target:
        if node.pardoned == pardoned:
            return state
        return state.with_node(node.model_copy(update={"pardoned": pardoned, "version": node.version + 1}))
    # A cordon on a draining node ends the drain and keeps new replicas off; what has moved stays where it is.
    cause = "cordoned by an operator" if cordoned else ""
    update = {"state": target, "since": now, "cause": cause, "pardoned": pardoned, "version": node.version + 1}
    return state.with_node(node.model_copy(update=update))


def drain_node(state: FleetState, name: str, deadline_s: float, now: float, trace: str = "") -> FleetState:
    """Keep new replicas off a node and move what runs there; after the deadline it is stopped in any case.

    `trace` is the traceparent of who asks.
    """
    node = find_node(state, name)
    if node.state is NodeState.LOST:
        raise RefusedError(Reason.BAD_INPUT, f"node {name} is lost: there is nothing to drain")
    if deadline_s < 0:
        raise RefusedError(Reason.BAD_INPUT, f"deadline_s: {deadline_s:g} is less than 0")
    update = {
        "state": NodeState.DRAINING,
        "since": now,
        "cause": "drained by an operator",
        "drain_until": now + deadline_s,
        "trace": trace,
        "version": node.version + 1,
    }
    return state.with_node(node.model_copy(update=update))


def release_brake(state: FleetState) -> FleetState:
    """Reap all the same: an operator knows that the lost nodes are gone for good."""
    lost = {
        key: node.model_copy(update={"left": True, "version": node.version + 1})
        for key, node in state.nodes.items()
        if node.state is NodeState.LOST and not node.left
    }
    return state.model_copy(update={"brake": "", "nodes": {**state.nodes, **lost}})


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


def _started_with(spec: ModelSpec) -> tuple[object, ...]:
    return (
        spec.engine,
        spec.weights.model_copy(update={"hub": ""}),  # another way to the same bytes is no other version
        spec.need,
        spec.shards,
        spec.pipeline_parallel,
        spec.constraints,
        spec.context_length,
        spec.concurrency,
        spec.args,
        spec.task,
        spec.trust_remote_code,
    )

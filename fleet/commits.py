"""A plan made true: reservations are made here, before anything starts."""

from fleet.facts import failed
from fleet.reasons import Failure, Reason
from fleet.state import FleetState, ReplicaRecord, ReplicaState
from fleet.steps import ENDS, Plan, Step, StepKind


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
    for name, replicas in plan.scaled.items():
        model = state.models[name]
        update = {"scaled": replicas, "scaled_at": now, "version": model.version + 1}
        state = state.with_model(model.model_copy(update=update))
    for name in plan.waits_over:
        model = state.models[name]
        state = state.with_model(model.model_copy(update={"waiting": "", "version": model.version + 1}))
    for step in plan.steps:
        state = _commit_step(state, step, now)
    return state


def _commit_step(state: FleetState, step: Step, now: float) -> FleetState:
    if step.decision is not None:
        return _commit_placement(state, step, now)
    replica = state.replicas[step.replica]
    if step.kind is StepKind.REAP:
        return failed(state, replica, Failure(reason=Reason.NODE_LOST, detail=step.reason), now)
    if step.kind in ENDS and replica.state is ReplicaState.FAILED:
        return state.without_replica(replica.id)
    target = ReplicaState.PLACED
    if step.kind in ENDS:
        target = ReplicaState.STOPPING if step.at_once else ReplicaState.DRAINING
    # `RESUME` moves `since`, and with it the next deadline.
    update = {"state": target, "since": now, "version": replica.version + 1}
    return state.with_replica(replica.model_copy(update=update))


def _commit_placement(state: FleetState, step: Step, now: float) -> FleetState:
    model = state.models[step.model]
    decision = step.decision
    if decision is None or not decision.shards:
        waiting = decision.sentence if decision is not None else ""
        update = {"waiting": waiting, "decision": decision, "version": model.version + 1}
        return state.with_model(model.model_copy(update=update))
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
    state = state.with_model(model.model_copy(update=update)).with_replica(record)
    for name in record.nodes:  # a late plan that also counted on this room is refused
        node = state.nodes[name]
        state = state.with_node(node.model_copy(update={"version": node.version + 1}))
    return state.model_copy(update={"generation": max(state.generation, step.generation)})

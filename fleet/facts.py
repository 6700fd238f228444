"""What nodes and replicas tell the fleet: each function takes the state and one fact, and returns the next state.

Facts about an older generation or incarnation are ignored: the state comes back as it was.
"""

from fleet.demand import load_at
from fleet.measures import contradiction
from fleet.peaks import Measured, with_peak
from fleet.reasons import Failure, Reason, RefusedError
from fleet.records import Record
from fleet.state import HOLDING, FleetState, ForcedEnd, Inventory, NodeRecord, NodeState, ReplicaRecord, ReplicaState


class ReplicaEvent(Record):
    """What a Replica tells Fleet. STOPPED is `state=None`: it holds nothing and its record goes."""

    replica: str
    generation: int
    state: ReplicaState | None
    endpoint: str = ""
    failure: Failure | None = None
    trace: str = ""
    """traceparent of `start replica`, with STARTING."""
    left_in_flight: int = 0
    """Requests that the deadline of a drain cut short, with DRAINED."""
    measured: Measured | None = None
    """The most one of its shards was seen to take, with SERVING and at its end."""
    at: float = 0.0
    """When it was said, seconds since the epoch."""


FORCED_KEPT = 20
"""Forced ends that are remembered: an operator asks about the last maintenance, older ones are in the traces."""


def node_joined(
    state: FleetState, node: str, incarnation: str, inventory: Inventory, now: float, highest_generation: int = 0
) -> FleetState:
    """An agent introduced itself; a cordon outlives its restart.

    `highest_generation` is the last one the node has been asked for. A fleet that began anew counts on from there:
    the node refuses older ones, and what an older fleet started must not be taken for what this one starts.
    Raises RefusedError where the inventory contradicts itself.
    """
    fault = contradiction(inventory)
    if fault:
        raise RefusedError(Reason.BAD_INPUT, f"node {node} may not join: {fault}")
    if highest_generation > state.generation:
        state = state.model_copy(update={"generation": highest_generation})
    old = state.nodes.get(node)
    if old is None:
        record = NodeRecord(
            id=node, state=NodeState.READY, incarnation=incarnation, inventory=inventory, since=now, version=1
        )
        return _braked(state.with_node(record), now)
    closed = old.state if old.state is not NodeState.LOST else old.closed
    update = {
        "state": closed,
        "closed": NodeState.READY,
        "incarnation": incarnation,
        "inventory": inventory,
        "since": now if old.state is NodeState.LOST else old.since,
        "cause": "" if closed is NodeState.READY else old.cause,
        "left": False,
        "version": old.version + 1,
    }
    return _braked(state.with_node(old.model_copy(update=update)), now)


def claims(state: FleetState, node: str) -> tuple[ReplicaRecord, ...]:
    """The replicas that should have a shard on this node."""
    return tuple(replica for replica in state.replicas.values() if replica.state in HOLDING and node in replica.nodes)


def node_measured(state: FleetState, node: str, incarnation: str, inventory: Inventory) -> FleetState:
    """A node measured itself anew; a measurement that contradicts itself is not believed, and the last one stays.

    Who joins with one is told; by then the node serves, and nothing is gained by a report that is refused for ever.
    """
    old = state.nodes.get(node)
    if old is None or old.incarnation != incarnation or old.inventory == inventory or contradiction(inventory):
        return state
    return state.with_node(old.model_copy(update={"inventory": inventory, "version": old.version + 1}))


def node_lost(
    state: FleetState, node: str, incarnation: str, cause: str, now: float, *, left: bool = False
) -> FleetState:
    """A node's lease ran out and nobody took it up, or (`left`) its agent said goodbye."""
    old = state.nodes.get(node)
    if old is None or old.incarnation != incarnation or old.state is NodeState.LOST:
        return state
    update = {
        "state": NodeState.LOST,
        "closed": old.state,
        "since": now,
        "cause": cause,
        "left": left,
        "version": old.version + 1,
    }
    return _braked(state.with_node(old.model_copy(update=update)), now)


def _braked(state: FleetState, now: float) -> FleetState:
    """Pull the brake when too many nodes are lost at once; let it go when enough are back."""
    policy = state.policy
    gone = [node for node in state.nodes.values() if node.state is NodeState.LOST and not node.left]
    recent = [node for node in gone if node.since > now - policy.mass_loss_window_s]
    members = [node for node in state.nodes.values() if not node.left]
    counted = gone if state.brake else recent  # once pulled it holds until nodes return, however long that takes
    if len(counted) <= policy.mass_loss_share * len(members):
        return state if not state.brake else state.model_copy(update={"brake": ""})
    sentence = f"{len(counted)} of {len(members)} nodes are lost: nothing is reaped until some are back"
    return state if state.brake == sentence else state.model_copy(update={"brake": sentence})


class Load(Record):
    """What one replica's engine works on, as its node read it."""

    replica: str
    generation: int
    in_flight: int


def loaded(state: FleetState, node: str, incarnation: str, loads: tuple[Load, ...], now: float) -> FleetState:
    """A node told how busy its replicas are."""
    member = state.nodes.get(node)
    if member is None or member.incarnation != incarnation:
        return state
    for load in loads:
        replica = state.replicas.get(load.replica)
        if replica is None or replica.generation != load.generation:
            continue
        value = load_at(replica, now) if replica.loaded_at else load.in_flight
        # No new version: a plan does not rest on it being exact.
        update = {"load": value, "loaded_at": now, "in_flight": load.in_flight}
        state = state.with_replica(replica.model_copy(update=update))
        if load.in_flight or replica.in_flight:  # also as the last one ends: idleness begins there
            state = used(state, replica.model, now)
    return state


def used(state: FleetState, model: str, now: float) -> FleetState:
    """Somebody asks for a model: it is not idle, and one at zero is started."""
    record = state.models.get(model)
    return state if record is None else state.with_model(record.model_copy(update={"used_at": now}))


def replica_changed(state: FleetState, event: ReplicaEvent, now: float) -> FleetState:
    """A replica's workflow told where it is."""
    if event.measured is not None:  # true whatever became of the replica meanwhile
        peaks = with_peak(state.peaks, event.measured, now)
        state = state if peaks == state.peaks else state.model_copy(update={"peaks": peaks})
    old = state.replicas.get(event.replica)
    if old is None or old.generation != event.generation:
        return state
    if event.state is None:
        return state.without_replica(old.id)
    old = old.model_copy(update={"told_at": event.at})
    if old.state is ReplicaState.FAILED:
        return state  # reaped meanwhile: it holds nothing, and only a new generation may
    if event.state is ReplicaState.FAILED:
        return failed(state, old, event.failure or Failure(reason=Reason.INTERNAL, detail="no cause was given"), now)
    if not _follows(old.state, event.state):
        return state
    update = {
        "state": event.state,
        "since": now,
        "endpoint": event.endpoint if event.state is ReplicaState.SERVING else old.endpoint,
        "trace": event.trace or old.trace,
        "cut_short": event.left_in_flight,
        "version": old.version + 1,
    }
    if event.left_in_flight:
        forced = ForcedEnd(replica=old.id, model=old.model, nodes=old.nodes, requests=event.left_in_flight, at=now)
        state = state.model_copy(update={"forced": (*state.forced, forced)[-FORCED_KEPT:]})
    if event.state is ReplicaState.SERVING:
        state = used(state, old.model, now)  # whoever waited for it comes now: its idleness begins here
    return state.with_replica(old.model_copy(update=update))


def replica_orphaned(state: FleetState, replica: str, generation: int, now: float) -> FleetState:
    """A replica's workflow is gone without a word (somebody terminated it): what it did is taken up by a new one.

    A start is sent again, and finds the engine that runs; a drain or a stop is decided again.
    """
    old = state.replicas.get(replica)
    again = {
        ReplicaState.STARTING: ReplicaState.PLACED,
        ReplicaState.SERVING: ReplicaState.PLACED,
        ReplicaState.DRAINING: ReplicaState.DRAINED,
        ReplicaState.STOPPING: ReplicaState.DRAINED,
    }
    if old is None or old.generation != generation or old.state not in again:
        return state
    due = now - state.policy.unstarted_after_s
    update = {"state": again[old.state], "since": due, "version": old.version + 1}
    return state.with_replica(old.model_copy(update=update))


def _follows(old: ReplicaState, new: ReplicaState) -> bool:
    # DRAINING and STOPPING are decided here and told to the replica, so a late STARTING or SERVING changes nothing.
    return {
        ReplicaState.STARTING: old is ReplicaState.PLACED,
        ReplicaState.SERVING: old in (ReplicaState.PLACED, ReplicaState.STARTING),
        ReplicaState.DRAINED: old is ReplicaState.DRAINING,
    }.get(new, False)


def failed(state: FleetState, replica: ReplicaRecord, failure: Failure, now: float) -> FleetState:
    """A replica is at its end: it holds nothing any more, and is tried again unless that cannot help."""
    policy = state.policy.restart
    model = state.models.get(replica.model)
    going = replica.state in (ReplicaState.DRAINING, ReplicaState.DRAINED, ReplicaState.STOPPING)
    if model is None or model.removing or going:
        return state.without_replica(replica.id)
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
    return state.with_replica(replica.model_copy(update=update))

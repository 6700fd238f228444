"""How many replicas there should be: by the operator, and by demand."""

from fleet.facts import used
from fleet.spec import ModelSpec, Scaling
from fleet.state import FleetState, ReplicaState
from fleet.wishes import remove, scale
from tests.situations.fleets import GIB, Moment, busy, fleet, inventory, served, spec, told

NODES = {"n1": inventory(memory=8 * GIB), "n2": inventory(memory=8 * GIB)}


def elastic(replicas: int = 1, **scaling: float) -> ModelSpec:
    return spec("m", replicas=replicas, scaling=Scaling.model_validate({"min": 0, "max": 3, **scaling}))


def serving(model: ModelSpec) -> FleetState:
    return served(fleet(NODES, model), 10.0)


def scale_up_by_the_operator() -> Moment:
    """The operator wants three where one serves."""
    return Moment(scale(serving(spec("m")), "m", 3), 20.0)


def scale_down_by_the_operator() -> Moment:
    """The operator wants one of three: the one that works on the most stays."""
    state = busy(serving(spec("m", replicas=3)), 19.0, m_0=1, m_1=5, m_2=2)
    return Moment(scale(state, "m", 1), 20.0)


def scale_down_of_one_that_starts() -> Moment:
    """One of two still starts: it goes first, and at once."""
    state = serving(spec("m"))
    state = scale(state, "m", 2)
    state = told(served(state, 20.0), "m-1", ReplicaState.STARTING, 21.0)
    record = state.replicas["m-1"].model_copy(update={"state": ReplicaState.STARTING})
    return Moment(scale(state.with_replica(record), "m", 1), 22.0)


def scale_up_by_demand() -> Moment:
    """Nine requests in flight, four a replica: three are needed where one serves."""
    return Moment(busy(serving(elastic()), 100.0, m_0=9), 160.0)


def scale_down_by_demand() -> Moment:
    """Three serve, and what is in flight needs one; the cool-down is over."""
    return Moment(busy(serving(elastic(replicas=3)), 100.0, m_0=1, m_1=1, m_2=0), 200.0)


def cooldown() -> Moment:
    """The same load, and the number has just changed: nothing is done before the cool-down ends."""
    return Moment(busy(serving(elastic(replicas=3)), 20.0, m_0=1, m_1=1, m_2=0), 50.0)


def to_zero_after_idle() -> Moment:
    """Nobody has asked for ten minutes: the last replica goes."""
    state = busy(busy(serving(elastic()), 20.0, m_0=1), 30.0, m_0=0)
    return Moment(state, 630.0)


def not_yet_idle() -> Moment:
    """Nobody has asked for nine minutes: it stays, and is looked at again when the ten are over."""
    state = busy(busy(serving(elastic()), 20.0, m_0=1), 30.0, m_0=0)
    return Moment(state, 570.0)


def wake_from_zero() -> Moment:
    """A request came for a model that has gone to zero."""
    state = served(busy(busy(serving(elastic()), 20.0, m_0=1), 30.0, m_0=0), 630.0)
    state = told(state, "m-0", ReplicaState.DRAINED, 633.0)
    state = told(served(state, 634.0), "m-0", None, 635.0)
    return Moment(used(state, "m", 700.0), 700.0)


def removed() -> Moment:
    """A model is removed: what serves is drained."""
    return Moment(remove(busy(serving(spec("m", replicas=2)), 19.0, m_0=3), "m"), 20.0)

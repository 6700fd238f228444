"""Who goes for what does not fit, and who does not."""

from fleet.facts import used
from fleet.spec import Scaling
from fleet.state import FleetState
from fleet.wishes import remove
from tests.situations.fleets import GIB, Moment, busy, fleet, inventory, planned, served, spec, wanted

TO_ZERO = Scaling(min=0, max=1, idle_after_s=3600)


def idle_ones(memory: int = 4) -> FleetState:
    """Two models that may go to zero fill a node; `old` was used last at 100 s, `new` at 200 s."""
    state = fleet(
        {"n1": inventory(memory=8 * GIB)},
        spec("old", memory=memory * GIB, scaling=TO_ZERO),
        spec("new", memory=4 * GIB, scaling=TO_ZERO),
    )
    return used(used(served(state, 10.0), "old", 100.0), "new", 200.0)


def full_of(priority: int = 10) -> FleetState:
    """Four models of 2 GiB and low priority fill one node, one of 8 GiB the other."""
    small = [spec(f"s{number}", memory=2 * GIB, priority=priority) for number in range(1, 5)]
    nodes = {"n1": inventory(memory=8 * GIB), "n2": inventory(memory=8 * GIB)}
    return served(fleet(nodes, spec("large", memory=8 * GIB, priority=priority), *small), 10.0)


def evict_the_least_recently_used() -> Moment:
    """Two idle models hold the room: the one that was not used for the longest time goes, the other stays."""
    return Moment(wanted(idle_ones(), spec("m", memory=4 * GIB), now=400.0), 400.0)


def no_eviction_of_one_just_used() -> Moment:
    """Both were used within the last minute: nobody is evicted."""
    state = used(used(idle_ones(), "old", 390.0), "new", 395.0)
    return Moment(wanted(state, spec("m", memory=4 * GIB), now=400.0), 400.0)


def no_useless_eviction() -> Moment:
    """What is wanted would not fit even with all idle models gone: they stay."""
    return Moment(wanted(idle_ones(), spec("m", memory=9 * GIB), now=400.0), 400.0)


def preempt_the_fewest() -> Moment:
    """One large model on one node or three small ones on another: one is preempted."""
    return Moment(wanted(full_of(), spec("m", memory=6 * GIB, priority=90), now=20.0), 20.0)


def preempt_the_cheapest() -> Moment:
    """Any one of four would do: the one that works on the least is preempted."""
    state = busy(full_of(), 19.0, s1_0=4, s2_0=3, s3_0=1, s4_0=2, large_0=1)
    return Moment(wanted(state, spec("m", memory=2 * GIB, priority=90), now=20.0), 20.0)


def no_preemption_of_equals() -> Moment:
    """Equal priority takes nothing from anybody."""
    return Moment(wanted(full_of(priority=50), spec("m", memory=6 * GIB, priority=50), now=20.0), 20.0)


def room_is_being_made() -> Moment:
    """A victim still drains: its room is kept for the one it goes for, and a small one that came later waits."""
    state = planned(wanted(full_of(), spec("m", memory=8 * GIB, priority=90), now=20.0), 20.0)
    return Moment(wanted(state, spec("late", memory=GIB, priority=10), now=21.0), 22.0)


def room_of_what_goes_anyway() -> Moment:
    """The room comes from a model that is being removed: nobody is evicted or preempted for it."""
    state = planned(remove(full_of(), "large"), 20.0)
    return Moment(wanted(state, spec("m", memory=6 * GIB, priority=90), now=21.0), 21.0)

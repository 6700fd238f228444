"""What people may change in a fleet: each wish by name, with its argument and the sentence that answers it.

`Fleet` registers each as an update with a validator, so that a wish that is refused is answered with an error and
leaves no event in the history.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from activities import contract
from activities.contract import DrainArg, NameArg, ScaleArg
from fleet import wishes
from fleet.records import Typed
from fleet.state import FleetState
from workflows.spans import traceparent


class Nothing(Typed):
    """The argument of a wish that needs none."""


class Wish(NamedTuple):
    """One wish: the type of its argument, what it makes of the state at a time, and its answer."""

    argument: type[Typed]
    grant: Callable[[FleetState, Any, float], FleetState]
    answer: Callable[[FleetState, Any], str]
    check: Callable[[FleetState, Any], None] = lambda state, arg: None
    """Refuses a new wish that older histories hold as granted, so that `grant` must go on granting it."""


def _brake(state: FleetState, arg: Nothing) -> str:
    return f"the brake is released ({state.brake})" if state.brake else "the brake was not on"


WISHES: Mapping[str, Wish] = MappingProxyType(
    {
        contract.UPDATE_REMOVE: Wish(
            NameArg,
            lambda state, arg, now: wishes.remove(state, arg.name),
            lambda state, arg: f"{arg.name} is being removed",
        ),
        contract.UPDATE_SCALE: Wish(
            ScaleArg,
            lambda state, arg, now: wishes.scale(state, arg.name, arg.replicas),
            lambda state, arg: f"{arg.name} is scaled to {arg.replicas} replicas",
            lambda state, arg: wishes.check_scale(state, arg.name),
        ),
        contract.UPDATE_RETRY: Wish(
            NameArg,
            lambda state, arg, now: wishes.retry(state, arg.name, now),
            lambda state, arg: f"{arg.name} is tried again",
        ),
        contract.UPDATE_CORDON: Wish(
            NameArg,
            lambda state, arg, now: wishes.cordon(state, arg.name, True, now),
            lambda state, arg: f"node {arg.name} is cordoned",
        ),
        contract.UPDATE_UNCORDON: Wish(
            NameArg,
            lambda state, arg, now: wishes.cordon(state, arg.name, False, now),
            lambda state, arg: f"node {arg.name} is uncordoned",
        ),
        contract.UPDATE_DRAIN: Wish(
            DrainArg,
            lambda state, arg, now: wishes.drain_node(state, arg.name, arg.deadline_s, now, traceparent()),
            lambda state, arg: f"node {arg.name} is being drained, in {arg.deadline_s:g} s at the latest",
        ),
        contract.UPDATE_RELEASE_BRAKE: Wish(Nothing, lambda state, arg, now: wishes.release_brake(state), _brake),
    }
)
"""By the update's name."""

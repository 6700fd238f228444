"""How the fleet stands, as numbers: replicas and nodes by state, from what a worker's rounds see of Fleet.

Every worker shows them, and all show the same: take the maximum, not the sum.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from fleet import standing
from fleet.metrics import BRAKE, NODES, REPLICAS, WANTED
from fleet.state import FleetState
from runtime.instruments import Labels, gauge

STALE_S = 60.0
"""After six rounds without an answer nothing is shown: better a gap than a lie."""

Seen = Iterable[tuple[float, Labels]]


class FleetGauges:
    """The last state that a round saw."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: FleetState | None = None
        self._seen_at = 0.0
        gauge(REPLICAS, lambda: _of(self._fresh(), replicas))
        gauge(WANTED, lambda: _of(self._fresh(), wanted))
        gauge(NODES, lambda: _of(self._fresh(), nodes))
        gauge(BRAKE, lambda: _of(self._fresh(), brake))

    def saw(self, state: FleetState) -> None:
        """A round saw this."""
        self._state, self._seen_at = state, self._clock()

    def _fresh(self) -> FleetState | None:
        return self._state if self._clock() - self._seen_at < STALE_S else None


def replicas(state: FleetState) -> Seen:
    """How many of each model are in each state; a model with none shows 0 that serve."""
    names = {model.spec.id: model.spec.name for model in state.models.values()}
    counted = Counter((replica.model, replica.state.value) for replica in state.replicas.values())
    counted.update({(model, "serving"): 0 for model in names})
    return [
        (number, {"llmgw.model.id": model, "llmgw.model": names.get(model, model), "llmgw.state": how})
        for (model, how), number in counted.items()
    ]


def wanted(state: FleetState) -> Seen:
    """How many of each model there should be."""
    return [
        (standing.wanted(state, model), {"llmgw.model.id": model.spec.id, "llmgw.model": model.spec.name})
        for model in state.models.values()
    ]


def nodes(state: FleetState) -> Seen:
    """How many are in each state; quarantine counts as one."""
    counted = Counter("quarantined" if node.quarantine else node.state.value for node in state.nodes.values())
    return [(number, {"llmgw.state": how}) for how, number in counted.items()]


def brake(state: FleetState) -> Seen:
    """Whether lost nodes are reaped."""
    return [(1.0 if state.brake else 0.0, {})]


def _of(state: FleetState | None, read: Callable[[FleetState], Seen]) -> Seen:
    return read(state) if state is not None else ()

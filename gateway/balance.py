"""Which replica takes the next request: the one with the fewest in flight, equals in turn.

Counts are this gateway's own. Several gateways balance each for itself, which evens out under load.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

SHUN_S = 5.0
"""An endpoint that could not be reached goes to the end of the order for this long. Without it, a dead replica has
the fewest requests in flight and is tried first by every request until the fleet has noticed, which takes seconds."""


class Balance:
    """Requests in flight per endpoint. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: dict[str, int] = {}
        self._turn = 0
        self._last_turn: dict[str, int] = {}
        self._unreachable_at: dict[str, float] = {}

    def pick(self, endpoints: Collection[str], tried: Collection[str] = ()) -> str | None:
        """The best endpoint that is not in `tried`; None where none is left. Ones that could not be reached go last."""
        left = [endpoint for endpoint in endpoints if endpoint not in tried]
        return min(left, key=self._order, default=None)

    @contextmanager
    def busy(self, endpoint: str) -> Iterator[None]:
        """Count one request in flight on `endpoint`."""
        self._turn += 1
        self._last_turn[endpoint] = self._turn
        self._in_flight[endpoint] = self.in_flight(endpoint) + 1
        try:
            yield
        finally:
            self._in_flight[endpoint] -= 1

    def in_flight(self, endpoint: str) -> int:
        """Requests this gateway has open there."""
        return self._in_flight.get(endpoint, 0)

    def unreachable(self, endpoint: str) -> None:
        """It refused a connection just now."""
        self._unreachable_at[endpoint] = self._clock()

    def forget_except(self, endpoints: Collection[str]) -> None:
        """Drop what is known of endpoints that are gone: replicas come and go, and the gateway runs for months."""
        for endpoint in [name for name in self._last_turn if name not in endpoints and not self.in_flight(name)]:
            self._last_turn.pop(endpoint)
            self._in_flight.pop(endpoint, None)
            self._unreachable_at.pop(endpoint, None)

    def _order(self, endpoint: str) -> tuple[bool, int, int]:
        failed_at = self._unreachable_at.get(endpoint)
        shunned = failed_at is not None and self._clock() < failed_at + SHUN_S
        return shunned, self.in_flight(endpoint), self._last_turn.get(endpoint, 0)

"""When the fleet is told how busy this node's replicas are: soon where it matters, seldom while it lasts."""

from collections.abc import Collection
from typing import NamedTuple

from fleet.demand import LOADS_GAP_S
from fleet.facts import Load

AGAIN_S = 60.0
"""What is in flight is told again after so long: it makes a lost report good."""
CHANGE = 0.2
"""Less than a fifth more or less would not change a number of replicas."""


class Told(NamedTuple):
    """What the fleet has heard of a replica, and when."""

    load: Load
    at: float


class Loads:
    """What was read last, and what the fleet knows of it. `now` is seconds of a clock that never goes back."""

    def __init__(self, *, gap_s: float = LOADS_GAP_S, again_s: float = AGAIN_S) -> None:
        self._gap_s = gap_s
        self._again_s = again_s
        self._read: dict[str, Load] = {}
        self._told: dict[str, Told] = {}
        self._unsure: set[str] = set()
        self._tried_at = float("-inf")

    def pace(self, gap_s: float) -> None:
        """From now on at least so long between two reports: the more nodes, the longer."""
        self._gap_s = gap_s

    def read(self, load: Load) -> None:
        """An engine said what it works on."""
        self._read[load.replica] = load

    def unread(self, replica: str) -> None:
        """It did not say, or too late: what it said before is not told any more."""
        self._read.pop(replica, None)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget all others: they do not serve here now."""
        self._read = {name: load for name, load in self._read.items() if name in replicas}
        self._told = {name: told for name, told in self._told.items() if name in replicas}
        self._unsure &= set(replicas)

    def unsure(self, replicas: Collection[str]) -> None:
        """The fleet may believe another number of these, such as one that an earlier agent told: tell them, even 0."""
        self._unsure |= set(replicas)

    def due(self, now: float) -> tuple[Load, ...]:
        """What to tell now; empty where nothing is worth a report or the last one is too young."""
        if now < self._tried_at + self._gap_s or not any(self._matters(load, now) for load in self._read.values()):
            return ()
        # What else is in flight comes along: it costs nothing more, and needs no report of its own soon.
        return tuple(load for load in self._read.values() if load.in_flight or self._matters(load, now))

    def tried(self, now: float) -> None:
        """A report is sent; until it is taken, what it says counts as untold."""
        self._tried_at = now

    def taken(self, loads: tuple[Load, ...], now: float) -> None:
        """The fleet has heard these."""
        for load in loads:
            self._told[load.replica] = Told(load, now)
            self._unsure.discard(load.replica)

    def _matters(self, load: Load, now: float) -> bool:
        if load.replica in self._unsure:
            return True
        told = self._told.get(load.replica)
        if told is None or told.load.generation != load.generation:
            return load.in_flight > 0  # a new generation begins with nothing in flight
        before, count = told.load.in_flight, load.in_flight
        if (before == 0) != (count == 0) or (count > 0 and now - told.at >= self._again_s):
            return True
        return abs(count - before) >= max(1.0, CHANGE * before)

"""How long a job goes on waiting for a place that no node has: a clock that runs only while it waits."""

from fleet.reasons import Failure
from fleet.render import duration

FIRST_LOOK_S = 1.0
"""At the earliest: the first pass after a spec was taken needs a moment, and has not failed before that."""
NEXT_LOOK_S = 5.0
"""Between two looks while room is being made for it: drains and stops take seconds, and each look is a few events."""


class RoomDeadline:
    """`deadline_s`: seconds, or None for as long as it takes. Times are seconds since the epoch."""

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        self._look_at: float | None = None
        """When to look whether there is room; None while nothing is waited for."""

    def waits(self, waits: bool, now: float) -> None:
        """Whether the model waits just now: the clock begins when that begins, and is forgotten when it ends."""
        if not waits or self._deadline_s is None:
            self._look_at = None
        elif self._look_at is None:
            self._look_at = now + max(self._deadline_s, FIRST_LOOK_S)

    def left_s(self, now: float) -> float | None:
        """Until the next look; None: there is none."""
        return None if self._look_at is None else max(0.01, self._look_at - now)

    def looked(self, now: float) -> None:
        """Room is being made: look again later."""
        self._look_at = now + max(self._deadline_s or 0.0, NEXT_LOOK_S)

    def given_up(self, failure: Failure) -> Failure:
        """The failure of a job that waits no longer."""
        after = duration(self._deadline_s or 0.0)
        return failure.model_copy(update={"detail": f"{failure.detail}; no room came within {after}"})

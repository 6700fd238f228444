"""How long a job goes on waiting for a place that no node has: a clock that runs only while it waits."""

from fleet.reasons import Failure
from fleet.render import duration

FIRST_LOOK_S = 1.0
"""At the earliest: the first pass after a spec was taken needs a moment, and has not failed before that."""
GIVE_WAY_S = 15.0
"""With another job waiting on the same model: it may ask for less. Not at once, as a node may be away for a moment."""
NEXT_LOOK_S = 5.0
"""Between two looks while room is being made for it: drains and stops take seconds, and each look is a few events."""


class RoomDeadline:
    """`deadline_s`: seconds, or None for as long as it takes. Times are seconds since the epoch."""

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        self._since: float | None = None
        """When it began to wait; None while nothing is waited for."""
        self._looked = 0.0
        """When room was being made for it."""

    def waits(self, waits: bool, now: float) -> None:
        """Whether the model waits just now: the clock begins when that begins, and is forgotten when it ends."""
        if not waits:
            self._since, self._looked = None, 0.0
        elif self._since is None:
            self._since = now

    def left_s(self, now: float, *, rival: bool) -> float | None:
        """Until the next look; None: there is none. `rival`: another job waits for this one to end."""
        may_wait = self._may_wait(rival)
        if self._since is None or may_wait is None:
            return None
        look_at = self._since + max(may_wait, FIRST_LOOK_S)
        if self._looked:
            look_at = max(look_at, self._looked + NEXT_LOOK_S)
        return max(0.01, look_at - now)

    def looked(self, now: float) -> None:
        """Room is being made: look again later."""
        self._looked = now

    def expired(self, now: float) -> bool:
        """Whether the deadline itself has come, and not only a rival's turn."""
        return self._deadline_s is not None and self._since is not None and now - self._since >= self._deadline_s

    def given_up(self, failure: Failure) -> Failure:
        """The failure of a job that waits no longer."""
        after = duration(self._deadline_s or 0.0)
        return failure.model_copy(update={"detail": f"{failure.detail}; no room came within {after}"})

    def _may_wait(self, rival: bool) -> float | None:
        if not rival:
            return self._deadline_s
        return GIVE_WAY_S if self._deadline_s is None else min(GIVE_WAY_S, self._deadline_s)

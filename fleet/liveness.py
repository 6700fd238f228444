"""Whether an engine that answers also works: busy is not dead, and late is not dead; to stand still with work is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """What one answer of an engine's metrics says."""

    in_flight: int | None
    """Requests it has, running or queued; None where it does not say."""
    progress: tuple[float, ...]
    """Whatever moves while it works; empty where it does not say."""


@dataclass(frozen=True)
class Pulse:
    """What is known of an engine's work. Times are seconds of a clock that never goes back."""

    moved_at: float
    """When it was seen to move last, later by as long as it then had nothing to do; at first, when it was looked at."""
    answered_at: float
    """When its metrics were answered last."""
    look: Look | None = None
    """That answer."""


def felt(pulse: Pulse, look: Look, now: float) -> Pulse:
    """After one more answer. One that does not tell whether it works counts as movement: nothing speaks against it.

    Time with nothing to do does not count, and takes nothing back: who asks an engine that hangs gives up, and comes
    again, and no such request has moved anything.
    """
    before = pulse.look
    untold = look.in_flight is None or not look.progress
    if untold or before is None or before.progress != look.progress:
        moved_at = now
    elif before.in_flight and look.in_flight:
        moved_at = pulse.moved_at
    else:
        moved_at = pulse.moved_at + now - pulse.answered_at
    return Pulse(moved_at=moved_at, answered_at=now, look=look)


def why_hung(pulse: Pulse, now: float, hung_after_s: float, silent_after_s: float) -> str:
    """What shows that it hangs, for people; empty while nothing does.

    Only what was seen counts: between two answers that are the same it stood still, but after the last answer nothing
    is known until it is silent for longer than any engine that works.
    """
    stood = pulse.answered_at - pulse.moved_at
    if stood >= hung_after_s and pulse.look is not None:
        return f"nothing moved for {stood:.0f} s with {pulse.look.in_flight} requests in flight"
    silent = now - pulse.answered_at
    return f"/metrics has not been answered for {silent:.0f} s" if silent >= silent_after_s else ""

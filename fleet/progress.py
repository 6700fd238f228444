"""How far a transfer is, as its heartbeats say it: in words for the web UI, in numbers for ctl."""

from collections import deque

from fleet.records import Record
from fleet.render import size

WINDOW_S = 5.0
"""The rate is that of so many last seconds: of the whole time it would hide a line that has stopped."""
SETTLE_S = 0.5
"""Within the first half second a rate says little."""


class Progress(Record):
    """The detail of a transfer's heartbeat."""

    said: str
    """`1.2 GiB of 4 GiB, 310 MiB/s`: first, because the web UI shows the record as it stands."""
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: int = 0
    """0 while it is not known."""


class Pace:
    """Follows one transfer. Times are seconds of any one clock."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, done: int, total: int, now: float) -> None:
        """So much is done."""
        self._done, self._total = done, total
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    def progress(self) -> Progress:
        """As it stands."""
        rate = 0
        if len(self._seen) > 1:
            (first, had), (last, has) = self._seen[0], self._seen[-1]
            rate = round((has - had) / (last - first)) if last - first >= SETTLE_S else 0
        said = f"{size(self._done)} of {size(self._total)}" + (f", {size(rate)}/s" if rate else "")
        return Progress(said=said, done_bytes=self._done, total_bytes=self._total, bytes_per_s=rate)

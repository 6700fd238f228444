"""Follows whether one engine's work goes on, by its own counters."""

import asyncio
import time

from agent.engines.adapter import Adapter
from agent.probe import Probe
from fleet.liveness import Look, Pulse, felt, why_hung

LOOK_S = 10.0
"""Between two looks: thirty of them fit into the five minutes of `hung_after_s`, and each costs a millisecond."""
LOOK_TIMEOUT_S = 60.0
"""An engine that is full of streams has answered after half a minute; what it says then is as good."""
LATE_AFTER_S = 120.0
"""Late is not dead: an engine full of long prompts has answered after half a minute. One that hangs never does."""


class Work:
    """One engine's work; `run` follows it."""

    def __init__(self, probe: Probe, adapter: Adapter, endpoint: str, hung_after_s: float) -> None:
        self._probe = probe
        self._adapter = adapter
        self._endpoint = endpoint
        self._hung_after_s = hung_after_s
        now = time.monotonic()
        self._pulse = Pulse(moved_at=now, answered_at=now)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            metrics = await self._probe.patient_metrics(self._endpoint, LOOK_TIMEOUT_S)
            if metrics is not None:
                look = Look(self._adapter.in_flight(metrics), self._adapter.progress(metrics))
                self._pulse = felt(self._pulse, look, time.monotonic())
            await asyncio.sleep(min(LOOK_S, self._hung_after_s / 4))

    @property
    def moved_at(self) -> float:
        """When it was seen to move, on the monotonic clock."""
        return self._pulse.moved_at

    def why_hung(self) -> str:
        """What shows that it hangs; empty while nothing does."""
        silent_after_s = self._hung_after_s + LATE_AFTER_S
        return why_hung(self._pulse, time.monotonic(), self._hung_after_s, silent_after_s)

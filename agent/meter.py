"""Reads off the engines' metrics how many requests each of this node's replicas works on."""

import asyncio
import time
from collections.abc import Callable, Mapping

from activities.node_contract import ShardRef
from agent.engines.adapter import Adapter
from agent.ledger import Entry, Ledger
from agent.loads import Loads
from agent.probe import Probe
from fleet.facts import Load
from fleet.spec import Engine

LOOK_S = 2.0
"""Two or three looks fit between two reports, so that what is told is fresh; one costs an engine a millisecond."""
SETTLE_S = 0.25
"""For the answers of one round, which take milliseconds: what is later is told with the next round."""
MAX_LOOKS = 32
"""At once. A look ends after the probe's five seconds at the latest, whatever its engine does."""


class Meter:
    """One look at each engine that serves, every few seconds; `wake` is told when there is something to report."""

    def __init__(
        self,
        ledger: Ledger,
        probe: Probe,
        adapters: Mapping[Engine, Adapter],
        loads: Loads,
        wake: Callable[[], None],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._ledger = ledger
        self._probe = probe
        self._adapters = adapters
        self._loads = loads
        self._wake = wake
        self._look_s = look_s
        self._looks: dict[ShardRef, asyncio.Task[None]] = {}
        self._looked_at: dict[ShardRef, float] = {}
        self._tokens: dict[ShardRef, int] = {}
        """What each had read and written in all when it was looked at last."""

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                began = time.monotonic()
                self._begin(began)
                if self._looks:
                    await asyncio.wait(self._looks.values(), timeout=min(SETTLE_S, self._look_s))
                self._collect()
                if self._loads.due(time.monotonic()):
                    self._wake()
                await asyncio.sleep(began + self._look_s - time.monotonic())
        finally:
            looks = list(self._looks.values())
            self._looks.clear()
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    def _begin(self, now: float) -> None:
        """Start a look at each engine at which none is under way, those that waited longest first."""
        serving = {entry.shard: entry for entry in self._ledger.entries() if _serves(entry)}
        self._loads.keep({shard.replica for shard in serving})
        for known in (self._looked_at, self._tokens):
            for shard in known.keys() - serving.keys():
                del known[shard]
        waiting = [entry for shard, entry in serving.items() if shard not in self._looks]
        waiting.sort(key=lambda entry: self._looked_at.get(entry.shard, 0.0))
        for entry in waiting[: MAX_LOOKS - len(self._looks)]:
            self._looked_at[entry.shard] = now
            self._looks[entry.shard] = asyncio.create_task(self._look(entry), name=f"meter {entry.shard.replica}")

    def _collect(self) -> None:
        for shard in [shard for shard, look in self._looks.items() if look.done()]:
            self._looks.pop(shard).result()
        for shard in self._looks:
            self._loads.unread(shard.replica)

    async def _look(self, entry: Entry) -> None:
        shard, adapter = entry.shard, self._adapters[entry.engine]
        metrics = await self._probe.metrics(entry.endpoint)
        count = adapter.in_flight(metrics) if metrics else None
        if metrics is None or count is None:
            self._loads.unread(shard.replica)
            return
        tokens = adapter.tokens(metrics)
        before = self._tokens.get(shard)
        if tokens is not None:
            self._tokens[shard] = tokens
            if count == 0 and before is not None and tokens > before:
                count = 1  # a request came and went between two looks: the model is not idle
        self._loads.read(Load(replica=shard.replica, generation=shard.generation, in_flight=count))


def _serves(entry: Entry) -> bool:
    # Of a gang, rank 0 takes the requests; the other ranks would count them again.
    return entry.ready and entry.process is not None and entry.failure is None and entry.shard.rank == 0

"""Measures what the engines of this node really take, so that the next run of the same is reserved what it needs."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from activities.node_contract import ShardRef
from agent.engines.adapter import Adapter
from agent.gpus import Gpus
from agent.ledger import Entry, Ledger
from agent.probe import Probe
from agent.processes import resident
from agent.supervisor import Supervisor
from fleet.peaks import Measured
from fleet.spec import Engine
from fleet.state import CPU

LOOK_S = 10.0
"""What engines hold grows with the first long prompts and then stays; a look costs some 20 ms of one core."""

LAST_LOOK_S = 1.0
"""A stop waits no longer for an engine that does not answer: what was seen before is told."""


class Peaks:
    """The most that each engine was seen to hold while it served.

    Looked at, not read off the kernel's own mark: that one also counts the files that vLLM maps while it loads.
    """

    def __init__(
        self,
        ledger: Ledger,
        supervisor: Supervisor,
        probe: Probe,
        adapters: Mapping[Engine, Adapter],
        gpus: Gpus,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._ledger = ledger
        self._supervisor = supervisor
        self._probe = probe
        self._adapters = adapters
        self._gpus = gpus
        self._look_s = look_s
        self._most: dict[ShardRef, int] = {}
        self._worked: set[ShardRef] = set()
        """Those that have read or written a token: before that an engine has not touched all it needs."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began = time.monotonic()
            serving = [entry for entry in self._ledger.entries() if _serves(entry)]
            known = {entry.shard for entry in serving}
            self._most = {shard: most for shard, most in self._most.items() if shard in known}
            self._worked &= known
            for entry in serving:
                await self._look(entry)
            await asyncio.sleep(max(0.1, began + self._look_s - time.monotonic()))

    async def measured(self, entry: Entry) -> Measured | None:
        """The most of this engine until now, for the fleet; None while it has served nothing."""
        if entry.run is None or not _serves(entry):
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_LOOK_S):
                await self._look(entry)
        most = self._most.get(entry.shard, 0)
        return Measured(run=entry.run, peak=most) if most and entry.shard in self._worked else None

    async def _look(self, entry: Entry) -> None:
        held = await asyncio.to_thread(self._held, entry)
        self._most[entry.shard] = max(held, self._most.get(entry.shard, 0))
        if entry.shard in self._worked:
            return
        metrics = await self._probe.metrics(entry.endpoint) if entry.shard.rank == 0 else None
        # Further ranks of a gang take no requests and tell no numbers: what they hold says rank 0 as well.
        if metrics is not None and (self._adapters[entry.engine].tokens(metrics) or 0) > 0:
            self._worked.add(entry.shard)

    def _held(self, entry: Entry) -> int:
        """Bytes now, on the device that holds most of it."""
        if entry.process is None:
            return 0
        pids = {member.pid for member in self._supervisor.members(entry.process)}
        uuids = {share.uuid for share in entry.devices} - {CPU}
        if not uuids:
            return resident(pids)
        return max(
            (
                sum(holder.memory for holder in gpu.holders if holder.pid in pids)
                for gpu in self._gpus()
                if gpu.uuid in uuids
            ),
            default=0,
        )


def _serves(entry: Entry) -> bool:
    return entry.ready and entry.process is not None and entry.failure is None

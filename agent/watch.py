"""Watches the engines that serve: an end within 0.2 s, a health that stays bad, work that stands still."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from activities.node_contract import ShardChange, ShardHealth, ShardRef
from agent.ending import Endings
from agent.engines.adapter import Adapter, ExitStatus
from agent.layout import shard_key
from agent.ledger import Entry, Ledger
from agent.probe import Health, Probe
from agent.supervisor import EngineProcess, Supervisor
from agent.work import LATE_AFTER_S, Work
from fleet.reasons import Failure, Reason
from fleet.spec import Engine

logger = logging.getLogger(__name__)

EXIT_POLL_S = 0.1
REPORT_AFTER_S = 1.0
"""From an end to its report, for what the engine left to go: most often it needs milliseconds."""
HEALTH_POLL_S = 2.0
UNHEALTHY_AFTER_S = 15.0
"""A busy engine can miss a look or two; one that answers nothing but errors for this long serves nobody."""
HUNG_AFTER_S = 300.0
"""Where nobody says otherwise: as long as SGLang itself grants one batch, and a hundred times what one takes."""


class Watch:
    """One task per engine that serves; what it sees goes to `report`."""

    def __init__(
        self,
        node: str,
        ledger: Ledger,
        supervisor: Supervisor,
        endings: Endings,
        probe: Probe,
        adapters: Mapping[Engine, Adapter],
        report: Callable[[ShardChange], None],
        *,
        unhealthy_after_s: float = UNHEALTHY_AFTER_S,
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self._node = node
        self._ledger = ledger
        self._supervisor = supervisor
        self._endings = endings
        self._probe = probe
        self._adapters = adapters
        self._report = report
        self._unhealthy_after_s = unhealthy_after_s
        self._hung_after_s = hung_after_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, entry: Entry) -> None:
        """Watch an engine; watching it already is fine."""
        key = shard_key(entry.shard)
        watched = key in self._tasks and not self._tasks[key].done()
        if entry.process is not None and not watched:
            self._tasks[key] = asyncio.create_task(self._watch(entry, entry.process), name=f"watch {key}")

    async def end(self, shard: ShardRef) -> None:
        """Stop watching, so that a wanted end is not reported as a failure."""
        task = self._tasks.pop(shard_key(shard), None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """Stop watching all; the engines stay."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def bury(self, entry: Entry, status: ExitStatus) -> None:
        """An engine that served ended unasked: end what it left, keep the cause until it is taken, report it."""
        failure = self.cause(entry, status)
        if entry.process is not None:
            # What hangs must not hold the report up: it is held against the node when it is known to hang.
            await asyncio.wait([self._endings.begin(entry, entry.process)], timeout=REPORT_AFTER_S)
        logger.error(
            "engine ended replica=%s generation=%d: %s", entry.shard.replica, entry.shard.generation, failure.detail
        )
        self._ledger.put(entry.model_copy(update={"failure": failure}))
        self.report_exit(entry, failure)

    def report_exit(self, entry: Entry, failure: Failure) -> None:
        """Say that an engine ended; the ledger keeps it until the fleet has taken it."""
        self._report(ShardChange(shard=entry.shard, health=ShardHealth.EXITED, failure=failure))

    def cause(self, entry: Entry, status: ExitStatus) -> Failure:
        """Why an engine ended, by its exit and its log."""
        if status.code is None and status.signal is None:
            failure = Failure(reason=Reason.ENGINE_GONE, detail=f"the engine is gone: {status.note}")
        else:
            # Why a start failed can stand at its beginning; that is long past in the log of one that served.
            read = self._supervisor.tail if entry.ready else self._supervisor.output
            failure = self._adapters[entry.engine].diagnose(status, read(entry.stem))
        return failure.model_copy(update={"node": self._node})

    async def _watch(self, entry: Entry, process: EngineProcess) -> None:
        work = Work(self._probe, self._adapters[entry.engine], entry.endpoint, self._hung_after_s)
        looks = []
        if not entry.lead:  # one that opens no port answers by rank 0, whose own node looks at it
            looks.append(asyncio.create_task(self._watch_health(entry, work), name=f"health {entry.shard.replica}"))
        if entry.shard.rank == 0:  # of a gang, rank 0 alone has counters, and they stand still when any other hangs
            looks.append(asyncio.create_task(work.run(), name=f"work {entry.shard.replica}"))
        try:
            while True:
                status = self._supervisor.ended(process)
                if status is not None:
                    break
                await asyncio.sleep(EXIT_POLL_S)
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
        await self.bury(entry, status)

    async def _watch_health(self, entry: Entry, work: Work) -> None:
        path = self._adapters[entry.engine].health_path
        good = time.monotonic()
        reported = False
        while True:
            answer = await self._probe.health(entry.endpoint, path)
            now = time.monotonic()
            hung = work.why_hung() if entry.shard.rank == 0 else ""
            if answer.health is Health.SERVING and not hung:
                good, reported = now, False
            elif not reported and answer.health is Health.SERVING:
                reported = self._unhealthy(entry, f"hangs: {path} is fine, but {hung}")
            elif not reported:
                if answer.health is Health.LATE:
                    good = max(good, work.moved_at)  # busy is not dead
                patience = LATE_AFTER_S if answer.health is Health.LATE else self._unhealthy_after_s
                if now - good >= patience:
                    reported = self._unhealthy(entry, f"unhealthy for {now - good:.0f} s: {answer.detail}")
            await asyncio.sleep(min(HEALTH_POLL_S, self._unhealthy_after_s, self._hung_after_s))

    def _unhealthy(self, entry: Entry, detail: str) -> bool:
        failure = Failure(reason=Reason.ENGINE_GONE, detail=detail, node=self._node)
        logger.error(
            "engine unhealthy replica=%s generation=%d: %s", entry.shard.replica, entry.shard.generation, detail
        )
        self._report(ShardChange(shard=entry.shard, health=ShardHealth.UNHEALTHY, failure=failure))
        return True

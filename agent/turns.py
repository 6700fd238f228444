"""One act at a time on each shard, and the newest generation wins: start, drain and stop as the node means them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

from opentelemetry.trace import Span
from temporalio import activity

from activities.contract import ROUTES_STALE_S
from activities.node_contract import (
    PreparedShard,
    ReservedPort,
    ReservePort,
    ShardRef,
    StartedShard,
    StartShard,
    StoppedShard,
)
from agent.connections import clients
from agent.ending import Ended
from agent.layout import shard_key
from agent.ledger import Entry
from agent.peaks import Peaks
from agent.ports import choose_port, free_from, holder_of
from agent.spans import step
from agent.start import Progress, Starter
from fleet.reasons import Reason, StepError
from runtime.interceptors import ended_ns

logger = logging.getLogger(__name__)

CLEANUP_GRACE_S = 3.0
"""For an engine nobody has used yet, or that a newer generation replaces."""
DRAIN_POLL_S = 0.1


@dataclass(frozen=True)
class _Start:
    generation: int
    task: "asyncio.Task[object]"


class Turns:
    """All shards of this node; every act on one goes through here."""

    def __init__(self, node: str, starter: Starter, peaks: Peaks, left_running: Callable[[], None]) -> None:
        """`left_running` is told when an attempt ended and its engine stays: the fleet may not want it any more."""
        self.node = node
        self._starter = starter
        self._peaks = peaks
        self._left_running = left_running
        self._ledger = starter.ledger
        self._supervisor = starter.supervisor
        self._watch = starter.watch
        self._adapters = starter.adapters
        self._locks: dict[str, asyncio.Lock] = {}
        self._starts: dict[str, _Start] = {}
        self._closed = False
        """Its engines are being stopped for good."""

    async def prepare(self, request: StartShard, progress: Progress) -> PreparedShard:
        """Have engine and weights for a shard of a gang, and start nothing. Raises StepError."""
        self._refuse_stale(request.shard)
        brought = await self._starter.prepare(request, progress)
        return PreparedShard(shard=request.shard, node=self.node, weights_outcome=brought.outcome, ended_ns=ended_ns())

    async def reserve(self, request: ReservePort) -> ReservedPort:
        """Keep a port for a gang's rendezvous until its shard ends here; the same again is the same port.

        One that another node chose is kept or answered as taken. Raises StepError(PORT_IN_USE) where none is free.
        """
        self._refuse_stale(request.shard)
        config = self._starter.config
        kept = self._ledger.meeting(request.shard)
        if kept is not None and kept not in request.avoid and request.port in (0, kept):
            return ReservedPort(address=config.address, port=kept, ended_ns=ended_ns())
        if request.port:
            chosen = free_from(config, self._ledger, request.port)
        else:
            chosen = choose_port(config, self._ledger, request.avoid)
        if request.port in (0, chosen.port):
            self._ledger.meet(request.shard, chosen.port)
        found = next((port for port in chosen.taken if port not in request.avoid), None)
        # It reads all of /proc: half a second where thousands of processes run.
        holder = await asyncio.to_thread(holder_of, config.address, found, self._ledger.entries()) if found else None
        return ReservedPort(
            address=config.address, port=chosen.port, taken=chosen.taken, holder=holder, ended_ns=ended_ns()
        )

    async def start(self, request: StartShard, progress: Progress) -> StartedShard:
        """Have exactly this generation serve; what runs already is gone on with.

        Raises StepError with the cause; then no process, partial file or ledger entry of it is left.
        """
        shard = request.shard
        key = shard_key(shard)
        self._refuse_stale(shard)
        with step("note start"):  # so that a next agent knows of it
            self._ledger.note_start(shard)
        older = self._starts.get(key)
        if older is not None and older.generation < shard.generation:
            older.task.cancel()
        async with self._turn(key):
            self._refuse_stale(shard)
            task = asyncio.current_task()
            if task is not None:
                self._starts[key] = _Start(shard.generation, task)
            try:
                return await self._run(request, progress)
            finally:
                self._starts.pop(key, None)

    async def stop(self, shard: ShardRef, grace_s: float) -> StoppedShard:
        """End this generation, and any older one, with everything it started. What is gone is a success."""
        with step("stop shard", self.attributes(shard)):
            key = shard_key(shard)
            with step("note stop"):
                self._ledger.note_stop(shard)
            start = self._starts.get(key)
            if interrupted := start is not None and start.generation <= shard.generation:
                start.task.cancel()
            async with self._turn(key):
                entry = self._ledger.entry(shard)
                self._ledger.give_back(shard)
                if entry is None or entry.shard.generation > shard.generation:
                    return StoppedShard(was_running=interrupted, ended_ns=ended_ns())
                ran = entry.process is not None and self._supervisor.runs(entry.process)
                with step("measure memory"):
                    measured = await self._peaks.measured(entry)
                ended = await self._end(entry, grace_s)
                logger.info("stopped replica=%s generation=%d killed=%s", shard.replica, shard.generation, ended.killed)
                return StoppedShard(
                    was_running=ran or interrupted,
                    killed=ended.killed,
                    held=ended.held,
                    measured=measured,
                    ended_ns=ended_ns(),
                )

    async def drain(self, entry: Entry, deadline_s: float) -> int:
        """Wait until nothing is in flight; what is left at the deadline. An engine nobody reaches has nothing.

        It also waits until no gateway sends to it any more, as one may not have read yet that it is off the routes;
        and until nobody is connected: an engine does not count a request that it has not read yet, nor an answer that
        its client has not taken yet. It closes by itself, after five seconds, what is connected and asks nothing.
        """
        began = time.monotonic()
        deadline = began + deadline_s
        quiet = 0
        while entry.process is not None and self._supervisor.runs(entry.process):
            metrics = await self._starter.probe.metrics(entry.endpoint)
            if metrics is None:
                return 0
            count = self._adapters[entry.engine].in_flight(metrics)
            connected = 0 if count else await asyncio.to_thread(clients, entry.endpoint)
            # A request on its way in is not counted yet: one empty look is not enough.
            settled = count == 0 and not connected and time.monotonic() - began >= ROUTES_STALE_S
            quiet = quiet + 1 if settled else 0
            if quiet == 2:
                return 0
            if time.monotonic() >= deadline:
                return count or connected  # each is connected: what does not say what it has, has at most these
            await asyncio.sleep(DRAIN_POLL_S)
        return 0

    async def stop_all(self, drain_s: float, grace_s: float) -> None:
        """Drain and end every engine of this node, those that start too. From now on it starts none."""
        self._closed = True

        async def one(entry: Entry) -> None:
            if entry.ready:
                await self.drain(entry, drain_s)
            await self.stop(entry.shard, grace_s)

        starting = [start.task for start in self._starts.values()]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        results = await asyncio.gather(*(one(entry) for entry in self._ledger.entries()), return_exceptions=True)
        for problem in results:
            if isinstance(problem, BaseException):
                logger.error("an engine could not be ended: %s", problem)

    def attributes(self, shard: ShardRef) -> dict[str, str | int]:
        """Of each span about one shard."""
        return {
            "llmgw.node": self.node,
            "llmgw.replica": shard.replica,
            "llmgw.generation": shard.generation,
            "llmgw.rank": shard.rank,
        }

    async def _run(self, request: StartShard, progress: Progress) -> StartedShard:
        shard = request.shard
        stays = False
        try:
            entry = await self._present(shard)
            adopted = entry is not None
            if entry is None:
                entry = await self._starter.launch(request, progress)
            if not entry.ready:
                entry = await self._starter.wait_ready(entry, request.ready_deadline_s, progress)
            stays = True
        except asyncio.CancelledError:
            stays = self._stays(shard)
            self._raise_cancelled(shard, stays)
        finally:
            if not stays:
                await self._clean_up(shard)
        self._watch.begin(entry)
        measured = None
        if adopted:  # what was launched now has answered nothing yet
            with step("measure memory"):
                measured = await self._peaks.measured(entry)
        logger.info("serving replica=%s generation=%d at %s", shard.replica, shard.generation, entry.endpoint)
        return StartedShard(
            shard=shard,
            node=self.node,
            pid=entry.process.engine.pid if entry.process is not None else 0,
            endpoint=entry.endpoint,
            weights_outcome=entry.weights_outcome,
            adopted=adopted,
            measured=measured,
            ended_ns=ended_ns(),
        )

    async def _present(self, shard: ShardRef) -> Entry | None:
        """This generation's engine, if it runs; an older one is ended. Raises StepError if this one has ended."""
        entry = self._ledger.entry(shard)
        if entry is None:
            return None
        if entry.shard.generation < shard.generation:
            await self._end(entry, CLEANUP_GRACE_S)
            return None
        if entry.failure is not None:
            raise StepError(entry.failure.reason, entry.failure.detail)
        process = entry.process or await self._supervisor.launched(entry.stem)
        status = self._supervisor.ended(process) if process is not None else None
        if process is None or (status is not None and status.note):
            await self._end(entry, 0)  # never launched, or gone without a trace, as with a restart of the machine
            return None
        found = entry.model_copy(update={"process": process})
        if status is not None:
            failure = self._watch.cause(found, status)
            raise StepError(failure.reason, failure.detail)
        self._ledger.put(found)
        return found

    def _refuse_stale(self, shard: ShardRef) -> None:
        if self._closed:
            raise StepError(Reason.NODE_UNREACHABLE, f"the agent of {self.node} ends with its engines")
        newest = self._ledger.started(shard)
        if shard.generation < newest:
            raise StepError(
                Reason.STALE_GENERATION,
                f"{shard.replica}: generation {shard.generation} is older than {newest}, which this node was asked for",
            )
        if shard.generation <= self._ledger.stopped(shard):
            raise StepError(
                Reason.STALE_GENERATION, f"{shard.replica}: generation {shard.generation} was stopped on this node"
            )

    def _overtaken(self, shard: ShardRef) -> bool:
        return shard.generation < self._ledger.started(shard) or shard.generation <= self._ledger.stopped(shard)

    def _stays(self, shard: ShardRef) -> bool:
        """Whether the engine of a cancelled attempt stays for the next one.

        It goes when somebody wants it gone: a cancellation, a stop, a newer generation. It stays when only this
        attempt is over: the agent ends, or Temporal was away and has given the attempt up.
        """
        details = activity.cancellation_details()
        if self._overtaken(shard) or (details is not None and details.cancel_requested):
            return False
        entry = self._ledger.entry(shard)
        return entry is not None and entry.process is not None

    def _raise_cancelled(self, shard: ShardRef, stays: bool) -> NoReturn:
        if self._overtaken(shard):
            raise StepError(Reason.CANCELLED, f"{shard.replica} was stopped or replaced while it started") from None
        if stays and not activity.is_worker_shutdown():
            self._left_running()
        raise asyncio.CancelledError

    async def _clean_up(self, shard: ShardRef) -> None:
        """Leave nothing of a start that came to nothing."""
        entry = self._ledger.entry(shard)
        if entry is None or entry.shard.generation != shard.generation:
            self._ledger.give_back(shard)
            return
        with step("stop engine") as span:
            # In a task of its own: a second cancellation must not leave a process behind.
            await asyncio.shield(asyncio.create_task(self._forget(entry, CLEANUP_GRACE_S, span)))

    async def _end(self, entry: Entry, grace_s: float) -> Ended:
        with step("stop engine") as span:
            return await self._forget(entry, grace_s, span)

    async def _forget(self, entry: Entry, grace_s: float, stopping: Span) -> Ended:
        """End an engine and forget it; `stopping` is the span of that."""
        await self._watch.end(entry.shard)
        process = entry.process or await self._supervisor.launched(entry.stem)
        ended = Ended(killed=False, held="")
        if process is not None:
            stopping.set_attribute("process.pid", process.engine.pid)
            ended = await self._starter.endings.end(entry, process, grace_s)
            stopping.set_attributes({"llmgw.killed": ended.killed, "llmgw.held": ended.held})
        self._ledger.drop(entry)
        return ended

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        """Hold the shard's lock; where an earlier act has it, under a span of the wait."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        with step("wait for turn") if lock.locked() else nullcontext():
            await lock.acquire()
        try:
            yield
        finally:
            lock.release()

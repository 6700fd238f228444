"""One generation of one replica: start its shards, then wait for news and commands, drain, stop, tell its end."""

import asyncio
from collections import deque
from typing import NamedTuple

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span
from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities import contract
from activities.node_contract import (
    DrainShard,
    ShardRef,
    StartShards,
    StopShard,
)
from fleet.facts import ReplicaEvent
from fleet.gangs import first_cause, may_be_echo
from fleet.peaks import Measured
from fleet.reasons import Failure, Reason
from fleet.render import markdown
from fleet.state import ReplicaState
from workflows import calls, messages, signals
from workflows.cancels import or_cancelled, to_the_end
from workflows.failures import failed, failure_of
from workflows.gang import ECHO_S, Outcome, all_or_none, came_within, start_gang, start_shard
from workflows.messages import Action, ReplicaInput, ShardNews, ToReplica
from workflows.spans import (
    TELL_FLEET,
    WAIT_FOR_WORKER,
    answered,
    ends,
    fail,
    past,
    searchable,
    shown,
    span,
    timed,
    traceparent,
    within,
)

MODEL = SearchAttributeKey.for_keyword(contract.SEARCH_MODEL)
NODE = SearchAttributeKey.for_keyword(contract.SEARCH_NODE)
STATE = SearchAttributeKey.for_keyword(contract.SEARCH_STATE)

STOP_AGAIN_S = 5.0
"""Between tries to stop a shard whose node does not answer; the end is a stop, or Fleet's word that it is lost."""

STOP_REST_S = 20.0
"""For what is left of a gang whose node is lost, on the nodes that live: they answer within a second, and what outlives
KILL by 15 s is held against them."""
REST_GRACE_S = 2.0
"""Between TERM and KILL there: without its peer a shard has nothing to end well."""

DRAIN_ONCE = "drain-once"
"""Patch: a drain that is said again is answered again, and not done again."""

BY_HAND = Failure(reason=Reason.STOPPED_BY_HAND, detail="somebody cancelled the replica's workflow")

LET_GO = "let-go"
"""Patch: a stop that is given up, because its node is lost, is not tried again."""


class Command(NamedTuple):
    """A drain or a stop, with the context of the pass that sent it, so that the node's spans join its trace."""

    name: str
    context: Context


@workflow.defn(name=contract.REPLICA_WORKFLOW)
class Replica:
    """`replica/<replica>`; a new run for each generation."""

    @workflow.init
    def __init__(self, input: ReplicaInput) -> None:
        self._input = input
        self._commands: deque[Command] = deque()
        self._broken: list[Failure] = []
        """What its shards told that served, in the order it came."""
        self._gone = False
        self._lost_nodes: tuple[str, ...] = ()
        self._trace = ""
        """traceparent of its start."""
        self._measured: Measured | None = None
        self._drained: int | None = None
        """Requests that were left when it was drained; None before."""

    @workflow.run
    async def run(self, input: ReplicaInput) -> None:
        """Live until stopped, failed or lost; the last thing it does is to tell Fleet."""
        node = input.shards[0].node if input.shards else ""
        workflow.upsert_search_attributes([MODEL.value_set(input.model), NODE.value_set(node)])
        try:
            await self._live()
        except BaseException as error:
            if not ends(error):
                raise
            # A person cancelled it, or it is a fault of ours: neither may leave an engine running and a reservation
            # that nobody ever gives back.
            await to_the_end(self._end_badly(BY_HAND if is_cancelled_exception(error) else failure_of(error)))
            raise

    async def _live(self) -> None:
        if self._input.action is Action.STOP:
            await self._stop_shards()
            return await self._tell_end(self._event(None))
        if not await self._start():
            return None
        while True:
            await workflow.wait_condition(self._has_news)
            if self._gone:
                return await self._tell_end(await self._lost())
            if self._broken:
                return await self._tell_end(await self._cleared(await self._cause()))
            command = self._commands.popleft()
            with within(command.context):
                if command.name == messages.SIGNAL_STOP:
                    self._show(ReplicaState.STOPPING)
                    await self._stop_shards()
                    return await self._tell_end(await self._lost() if self._gone else self._event(None))
                await self._drain_shards()

    async def _cleared(self, failure: Failure) -> ReplicaEvent:
        """Stop what a failure left; what Fleet is to be told then."""
        if not self._gone:
            await self._stop_shards()
            return self._event(ReplicaState.FAILED, failure=failure)
        return await self._lost()

    async def _tell(self, event: ReplicaEvent) -> None:
        await or_cancelled(signals.tell_fleet(self._input.cell, event))

    async def _tell_end(self, end: ReplicaEvent) -> None:
        self._show(end.state or "stopped", end.failure)
        await signals.tell_fleet(self._input.cell, end)

    # -- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> bool:
        """Start every shard; True when all are ready and Fleet knows, or when a command came first.

        False: it failed, nothing of it is left, and Fleet knows; all that is part of the failed start.
        """
        attributes: dict[str, str | int] = {
            "llmgw.replica": self._input.replica,
            "llmgw.model": self._input.model,
            "llmgw.generation": self._input.generation,
        }
        with span("start replica", attributes, start_ns=self._input.decided_at_ns or None) as starting:
            past(WAIT_FOR_WORKER, self._input.decided_at_ns or workflow.time_ns())
            self._trace = traceparent(starting)
            self._show(ReplicaState.STARTING)
            event = self._event(ReplicaState.STARTING, trace=self._trace)
            await timed(TELL_FLEET, self._tell(event))
            start = self._input.start
            if start is None:
                raise failed(Failure(reason=Reason.INTERNAL, detail="a start without shards was asked for"))
            started, failure = await self._start_shards(start, starting)
            if failure is not None:
                fail(starting, failure)
                await timed(TELL_FLEET, self._tell_end(await self._cleared(failure)))
                return False
            if started is None:
                fail(starting, self._interruption())
                return True
            self._show(ReplicaState.SERVING)
            for shard in started:
                self._note(shard.measured)
            event = self._event(ReplicaState.SERVING, endpoint=started[0].endpoint)
            await timed(TELL_FLEET, self._tell(event))
            return True

    async def _start_shards(self, start: StartShards, starting: Span) -> Outcome:
        replica = self._input.replica
        if not self._is_gang():
            (node,), (shard,) = start.nodes, start.shards
            started, failure = await all_or_none([node], [start_shard(replica, node, shard)], self._interrupted)
            return Outcome(started, failure)
        outcome = await start_gang(replica, start, starting, lambda: self._interrupted() or bool(self._broken))
        if self._broken and not self._interrupted():
            # One that was ready has ended while the others were not.
            return Outcome(None, await timed("wait for cause", self._cause()))
        return outcome

    async def _cause(self) -> Failure:
        """Why it broke. Of a gang the cause may be told later than its echo."""

        def told() -> bool:
            return self._gone or len(self._broken) == len(self._nodes()) or not all(map(may_be_echo, self._broken))

        if self._is_gang() and not told():
            await came_within(ECHO_S, told, "whether a peer tells the cause")
        return first_cause(self._broken)

    # -- drain and stop -----------------------------------------------------------------------------------------------

    async def _drain_shards(self) -> None:
        if self._drained is not None and workflow.patched(DRAIN_ONCE):
            # Said again because the answer was late or lost: the answer is what is missing, not another drain.
            event = self._event(ReplicaState.DRAINED, left_in_flight=self._drained)
            await self._tell(event)
            return
        self._show(ReplicaState.DRAINING)
        deadline = self._input.start.drain_deadline_s if self._input.start is not None else 0.0
        drains = [
            calls.drain_shard(node, DrainShard(shard=self._ref(rank), deadline_s=deadline))
            for rank, node in enumerate(self._nodes()[:1])  # of a gang, rank 0 alone takes requests
        ]
        left = 0
        for ended in await asyncio.gather(*drains, return_exceptions=True):
            if isinstance(ended, ActivityError):
                # A shard that cannot be drained serves nobody either: its stop follows and finds out.
                workflow.logger.warning("drain of %s: %s", self._input.replica, failure_of(ended).line)
            elif isinstance(ended, BaseException):
                raise ended
            else:
                left = ended.left_in_flight
        self._drained = left
        self._show(ReplicaState.DRAINED)
        await self._tell(self._event(ReplicaState.DRAINED, left_in_flight=left))

    async def _stop_shards(self) -> None:
        """Stop every shard, for as long as it takes: a shard that may run still holds its memory."""
        grace = REST_GRACE_S if self._gone else None
        stops = {node: asyncio.create_task(self._stop_shard(rank, node, grace)) for rank, node in self._ranks()}
        try:
            await workflow.wait_condition(lambda: self._gone or all(stop.done() for stop in stops.values()))
            if self._gone and self._is_gang():
                rest = [stop for node, stop in stops.items() if node not in self._lost_nodes]
                await came_within(STOP_REST_S, lambda: all(stop.done() for stop in rest), "stops on nodes that live")
        finally:
            for stop in stops.values():
                stop.cancel()
            await asyncio.gather(*stops.values(), return_exceptions=True)

    async def _stop_shard(self, rank: int, node: str, grace_s: float | None) -> None:
        request = StopShard(shard=self._ref(rank))
        if grace_s is not None:
            request = request.model_copy(update={"grace_s": grace_s})
        while True:
            begun = workflow.time_ns()
            try:
                stopped = await calls.stop_shard(node, request.model_copy(update={"asked_ns": begun}))
            except ActivityError as error:
                if is_cancelled_exception(error) and workflow.patched(LET_GO):
                    return
                workflow.logger.warning("stop of %s: %s", self._input.replica, failure_of(error).line)
                await workflow.sleep(STOP_AGAIN_S, summary=f"{node} did not stop {self._input.replica}: again"[:190])
            else:
                self._note(stopped.measured)
                answered(stopped.ended_ns, begun)
                return

    def _note(self, measured: Measured | None) -> None:
        """Keep the most that one of the shards took: it goes to Fleet with what is told next."""
        if measured is not None and (self._measured is None or measured.peak > self._measured.peak):
            self._measured = measured

    async def _end_badly(self, failure: Failure) -> None:
        await self._stop_shards()
        await signals.tell_fleet(self._input.cell, self._event(ReplicaState.FAILED, failure=failure))

    # -- what arrives -------------------------------------------------------------------------------------------------

    @workflow.signal(name=messages.SIGNAL_DRAIN)
    def drain(self, command: ToReplica) -> None:
        """Let requests run out; a stop follows."""
        if command.generation == self._input.generation:
            self._commands.append(Command(messages.SIGNAL_DRAIN, otel_context.get_current()))

    @workflow.signal(name=messages.SIGNAL_STOP)
    def stop(self, command: ToReplica) -> None:
        """Stop now, also while it starts."""
        if command.generation == self._input.generation:
            self._commands.append(Command(messages.SIGNAL_STOP, otel_context.get_current()))

    @workflow.signal(name=messages.SIGNAL_NODE_GONE)
    def node_gone(self, command: ToReplica) -> None:
        """Fleet took the replica from its node: nothing there is waited for."""
        if command.generation == self._input.generation:
            self._gone = True
            self._lost_nodes = command.lost

    @workflow.signal(name=messages.SIGNAL_SUPERSEDED)
    def superseded(self, command: ToReplica) -> None:
        """A newer generation wants to start."""
        if command.generation > self._input.generation:
            self._gone = True

    @workflow.signal(name=messages.SIGNAL_SHARD_CHANGED)
    def shard_changed(self, news: ShardNews) -> None:
        """A shard that served no longer does. One shard's death ends the replica."""
        if news.change.shard.generation == self._input.generation:
            self._broken.append(news.change.failure)

    # -- small things -------------------------------------------------------------------------------------------------

    def _has_news(self) -> bool:
        return self._gone or bool(self._broken or self._commands)

    def _interrupted(self) -> bool:
        return self._gone or any(command.name == messages.SIGNAL_STOP for command in self._commands)

    def _interruption(self) -> Failure:
        if self._gone:
            nodes = ", ".join(self._lost_nodes or self._nodes())
            return Failure(reason=Reason.NODE_LOST, detail=f"{nodes} is lost")
        return Failure(reason=Reason.CANCELLED, detail="it was told to stop while it started")

    def _nodes(self) -> list[str]:
        return [shard.node for shard in self._input.shards]

    def _ranks(self) -> list[tuple[int, str]]:
        return list(enumerate(self._nodes()))

    def _is_gang(self) -> bool:
        return len(self._input.shards) > 1

    def _ref(self, rank: int) -> ShardRef:
        return ShardRef(replica=self._input.replica, generation=self._input.generation, rank=rank)

    async def _lost(self) -> ReplicaEvent:
        """Its end without a word from a node; what is left of a gang on others is stopped, for it serves nobody."""
        if self._is_gang():
            await self._stop_shards()
        nodes = ", ".join(self._lost_nodes or self._nodes())
        return self._event(ReplicaState.FAILED, failure=Failure(reason=Reason.NODE_LOST, detail=f"{nodes} is lost"))

    def _event(
        self,
        state: ReplicaState | None,
        *,
        endpoint: str = "",
        failure: Failure | None = None,
        trace: str = "",
        left_in_flight: int = 0,
    ) -> ReplicaEvent:
        return ReplicaEvent(
            replica=self._input.replica,
            generation=self._input.generation,
            state=state,
            endpoint=endpoint,
            failure=failure,
            trace=trace,
            left_in_flight=left_in_flight,
            measured=self._measured,
            at=workflow.time(),
        )

    def _show(self, state: str, failure: Failure | None = None) -> None:
        workflow.upsert_search_attributes([STATE.value_set(state), *searchable(self._trace)])
        where = ", ".join(self._nodes())
        cause = f": {markdown(failure.line)}" if failure is not None else ""
        workflow.set_current_details(
            f"**{markdown(self._input.model)}** generation {self._input.generation} on {where} is {state}{cause}"
            f"{shown(self._trace)}"
        )

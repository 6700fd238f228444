"""The start of shards together: all of them or none, and of a gang only when every node has what it needs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, TypeVar

from opentelemetry.trace import Span, SpanKind
from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError, is_cancelled_exception

from activities.node_contract import (
    GangPlace,
    PortHolder,
    PreparedShard,
    ReservedPort,
    ReservePort,
    StartedShard,
    StartShard,
    StartShards,
)
from fleet.gangs import first_cause, may_be_echo, passed_over
from fleet.reasons import Failure, Reason
from fleet.render import port_taken
from workflows import calls
from workflows.failures import ended_ns, failed, failure_of
from workflows.spans import answered, ends, past, span

PORT_TRIES = 3
"""Starts at a port of their own. One that was free on all is taken within a second or two only by chance."""

PORT_ROUNDS = 8
"""Ports that rank 0's node proposes before each. Whoever has one taken names those after it that are taken too, so that
a node's engines, which have a row of them, cost one round."""

PORT_EVERYWHERE = "port-everywhere"
"""Patch: the port is looked at on every node of the gang, and not on rank 0's alone."""

ECHO_S = 3.0
"""From a failure that may be a peer's echo to the cause: an end is known within 0.2 s and told within a second more."""

ResultT = TypeVar("ResultT")
AnswerT = TypeVar("AnswerT", PreparedShard, ReservedPort, StartedShard)
Interrupted = Callable[[], bool]


class Outcome(NamedTuple):
    """All shards started, or why not; neither where a command came first."""

    started: tuple[StartedShard, ...] | None = None
    failure: Failure | None = None


async def start_shard(replica: str, node: str, shard: StartShard) -> StartedShard:
    """One shard, with the span of its way to the node."""
    with span("send start", {"llmgw.node": node, "llmgw.replica": replica}, kind=SpanKind.PRODUCER):
        return await _asked(node, lambda now: calls.start_shard(node, shard.model_copy(update={"asked_ns": now})))


async def start_gang(replica: str, start: StartShards, starting: Span, interrupted: Interrupted) -> Outcome:
    """Prepare every node, keep one port on all, start every shard; a port that turns out to be taken is replaced."""
    nodes = start.nodes
    prepares = [_prepare(replica, node, shard) for node, shard in zip(nodes, start.shards, strict=True)]
    prepared, failure = await all_or_none(nodes, prepares, interrupted)
    if prepared is None:
        return Outcome(None, failure)
    search = _PortSearch(start, starting, interrupted, everywhere=workflow.patched(PORT_EVERYWHERE))
    for _ in range(PORT_TRIES):
        place, failure = await search.agreed()
        if place is None:
            break
        placed = [shard.model_copy(update={"gang": place}) for shard in start.shards]
        starts = [start_shard(replica, node, shard) for node, shard in zip(nodes, placed, strict=True)]
        started, failure = await all_or_none(nodes, starts, interrupted, settle_s=ECHO_S)
        taken = failure is not None and failure.reason is Reason.PORT_IN_USE and failure.node == nodes[0]
        if failure is None or not taken:
            return Outcome(started, failure)
        search.turn_down(place.port, failure)
    return Outcome(None, failure)


async def all_or_none(
    nodes: Sequence[str], work: Sequence[Awaitable[ResultT]], interrupted: Interrupted, *, settle_s: float = 0.0
) -> tuple[tuple[ResultT, ...] | None, Failure | None]:
    """The results of all, or the cause of the failure, or neither where it is interrupted; what goes on is cancelled.

    `settle_s` is how long a failure that may be an echo waits for its cause. Returns when nothing of it runs any more.
    """
    failures: list[Failure] = []

    async def tracked(node: str, one: Awaitable[ResultT]) -> ResultT:
        try:
            return await one
        except FailureError as error:
            failures.append(failure_of(error, node=node))
            raise

    tasks = [asyncio.ensure_future(tracked(node, one)) for node, one in zip(nodes, work, strict=True)]

    def settled() -> bool:
        told = failures and not all(map(may_be_echo, failures))
        return interrupted() or bool(told) or all(task.done() for task in tasks)

    cause: Failure | None = None
    try:
        await workflow.wait_condition(lambda: settled() or any(map(_has_failed, tasks)))
        if failures and settle_s and not settled():
            await came_within(settle_s, settled, "whether a peer tells the cause")
        if failures and not interrupted():
            cause = first_cause(failures)
        whole = not failures and not interrupted() and not any(task.cancelled() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return (tuple(task.result() for task in tasks) if whole else None), cause


async def came_within(seconds: float, condition: Callable[[], bool], what: str) -> bool:
    """Wait for a condition so long at most; whether it came."""
    try:
        await workflow.wait_condition(condition, timeout=timedelta(seconds=seconds), timeout_summary=what)
    except TimeoutError:
        return False
    return True


@dataclass
class _PortSearch:
    """The port at which a gang meets: chosen by rank 0's node, kept by every node."""

    start: StartShards
    starting: Span
    interrupted: Interrupted
    everywhere: bool
    """Whether the other nodes are asked too."""
    _avoid: tuple[int, ...] = ()
    _taken: list[tuple[int, Failure]] = field(default_factory=list)
    """What was turned down since one was chosen."""

    async def agreed(self) -> tuple[GangPlace | None, Failure | None]:
        """One that all keep; or why there is none, or neither where it is interrupted."""
        lead, shard = self.start.nodes[0], self.start.shards[0].shard
        for _ in range(PORT_ROUNDS):
            reserving = ReservePort(shard=shard, avoid=self._avoid)
            proposed, failure = await all_or_none([lead], [_reserve(lead, reserving)], self.interrupted)
            if proposed is None:
                return None, failure
            (found,) = proposed
            self._note(lead, found.taken, found.holder)
            self._say(found.port)
            failure = await self._asked_others(found.port)
            if failure is not None or self.interrupted():
                return None, failure
            if not self._taken:
                return GangPlace(nodes=self.start.nodes, address=found.address, port=found.port), None
        _, last = self._taken[-1]
        detail = f"{last.detail}, and no port was free on every node in {PORT_ROUNDS} tries"
        return None, last.model_copy(update={"detail": detail})

    def turn_down(self, port: int, failure: Failure) -> None:
        """It turned out to be taken after all."""
        self._avoid = (*self._avoid, port)
        self._taken.append((port, failure))

    async def _asked_others(self, port: int) -> Failure | None:
        """Let them keep it, and note who cannot; why one did not answer."""
        if not self.everywhere:
            return None
        nodes = self.start.nodes[1:]
        keeping = [ReservePort(shard=start.shard, port=port) for start in self.start.shards[1:]]
        keeps = [_reserve(node, one) for node, one in zip(nodes, keeping, strict=True)]
        answers, failure = await all_or_none(nodes, keeps, self.interrupted)
        for node, answer in zip(nodes, answers, strict=True) if answers is not None else ():
            if port in answer.taken:
                holder = answer.holder or PortHolder(port=port)
                self._note(node, answer.taken, holder)
                if not holder.pid:  # nobody listens there: it may be kept for another gang, which looks for one too
                    left_out = passed_over(self.start.shards[0].shard.replica, len(self._avoid))
                    self._avoid = (*self._avoid, *range(port + 1, port + 1 + left_out))
        return failure

    def _note(self, node: str, taken: Sequence[int], holder: PortHolder | None) -> None:
        self._avoid = (*self._avoid, *(port for port in taken if port not in self._avoid))
        if holder is not None:
            detail = port_taken(holder.port, node, holder.pid, holder.name)
            self._taken.append((holder.port, Failure(reason=Reason.PORT_IN_USE, detail=detail, node=node)))

    def _say(self, port: int) -> None:
        for taken, failure in self._taken:
            sentence = f"{failure.detail}: {port} instead"
            self.starting.add_event(
                "port taken",
                {"llmgw.port": taken, "llmgw.node": failure.node, "llmgw.detail": sentence},
                timestamp=workflow.time_ns(),
            )
            workflow.logger.warning("%s: %s", self.start.shards[0].shard.replica, sentence)
        self._taken.clear()


async def _prepare(replica: str, node: str, shard: StartShard) -> PreparedShard:
    with span("send prepare", {"llmgw.node": node, "llmgw.replica": replica}, kind=SpanKind.PRODUCER):
        return await _asked(node, lambda now: calls.prepare_shard(node, shard.model_copy(update={"asked_ns": now})))


async def _reserve(node: str, request: ReservePort) -> ReservedPort:
    return await _asked(node, lambda now: calls.reserve_port(node, request.model_copy(update={"asked_ns": now})))


async def _asked(node: str, call: Callable[[int], Awaitable[AnswerT]]) -> AnswerT:
    """Call a node at once, with spans of the waits before and after its own; `call` takes the time of now.

    Raises ApplicationError with the cause, and the node's name in it.
    """
    begun = workflow.time_ns()
    try:
        answer = await call(begun)
    except (ActivityError, asyncio.CancelledError) as error:
        if not ends(error):
            raise
        failure = failure_of(error, node=node)
        cancelled = is_cancelled_exception(error)
        if cancelled or failure.reason is Reason.NODE_UNREACHABLE:
            past("wait for node", begun, {"llmgw.node": node})  # one that is gone leaves no span of its own
        answered(ended_ns(error), begun)
        if cancelled:
            raise
        raise failed(failure) from error
    answered(answer.ended_ns, begun)
    return answer


def _has_failed(task: "asyncio.Future[ResultT]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)

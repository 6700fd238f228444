"""The start of shards together: all of them or none, and of a gang only when every node has what it needs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

from opentelemetry.trace import Span, SpanKind
from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError, is_cancelled_exception

from activities.node_contract import (
    GangPlace,
    PreparedShard,
    ReservedPort,
    ReservePort,
    StartedShard,
    StartShard,
    StartShards,
)
from fleet.gangs import first_cause, may_be_echo
from fleet.reasons import Failure, Reason
from workflows import calls
from workflows.failures import ended_ns, failed, failure_of
from workflows.spans import answered, ends, past, span

PORT_TRIES = 3
"""Ports tried for one rendezvous. One that was free is taken within a second or two only by chance."""

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
    """Prepare every node, keep a port on rank 0's, start every shard; a port that turns out to be taken is replaced."""
    nodes = start.nodes
    prepares = [_prepare(replica, node, shard) for node, shard in zip(nodes, start.shards, strict=True)]
    prepared, failure = await all_or_none(nodes, prepares, interrupted)
    avoid: tuple[int, ...] = ()
    while prepared is not None and len(avoid) < PORT_TRIES:
        reserving = ReservePort(shard=start.shards[0].shard, avoid=avoid)
        reserved, failure = await all_or_none(nodes[:1], [_reserve(nodes[0], reserving)], interrupted)
        if reserved is None:
            break
        place = GangPlace(nodes=nodes, address=reserved[0].address, port=reserved[0].port)
        placed = [shard.model_copy(update={"gang": place}) for shard in start.shards]
        starts = [start_shard(replica, node, shard) for node, shard in zip(nodes, placed, strict=True)]
        started, failure = await all_or_none(nodes, starts, interrupted, settle_s=ECHO_S)
        taken = failure is not None and failure.reason is Reason.PORT_IN_USE and failure.node == nodes[0]
        if not taken:
            return Outcome(started, failure)
        avoid = (*avoid, place.port)
        starting.add_event("port taken", {"llmgw.port": place.port}, timestamp=workflow.time_ns())
        workflow.logger.warning("%s: port %d on %s was taken: another is chosen", replica, place.port, nodes[0])
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

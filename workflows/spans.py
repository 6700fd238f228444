"""Spans inside workflows: true times, waits once they are over, causes on errors, and contexts that travel as text.

Only the OpenTelemetry API is used. While tracing is off every span is the no-op one and `traceparent` is "".
"""

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue
from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate
from temporalio.exceptions import is_cancelled_exception

from activities.contract import SEARCH_TRACE
from fleet.reasons import Failure
from fleet.trace_ids import trace_id_of
from workflows.failures import failure_of

TRACER = trace.get_tracer("llmgw.workflows")
EPOCH = datetime.fromtimestamp(0, UTC)
ResultT = TypeVar("ResultT")

WAIT_FOR_WORKER = "wait for worker"
"""Span of the way of a message between workflows, until a worker takes it up."""
TELL_FLEET = "tell fleet"
"""Span of a message to Fleet, until it is taken."""

TRACE = SearchAttributeKey.for_keyword(SEARCH_TRACE)


@contextmanager
def span(
    name: str,
    attributes: Mapping[str, AttributeValue | str | int],
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
    links: Sequence[Link] = (),
    root: bool = False,
) -> Iterator[Span]:
    """A span around a piece of a workflow; an exception that leaves it makes it an error with its cause.

    `start_ns` is nanoseconds since the epoch; the workflow's own time where it is not given, so that a replay gives
    the span its original start. Open it in `run` or what it calls, never in `__init__`, a query or a validator.
    `root`: it begins a trace of its own.
    """
    opened = TRACER.start_span(
        name,
        context=Context() if root else None,
        kind=kind,
        attributes=dict(attributes),
        links=list(links),
        start_time=start_ns if start_ns is not None else workflow.time_ns(),
    )
    try:
        with within(trace.set_span_in_context(opened)):
            yield opened
    except BaseException as error:
        if not ends(error):
            raise  # it is opened anew, with the same ids; ending it here would export it early
        fail(opened, failure_of(error))
        opened.end(end_time=workflow.time_ns())
        raise
    opened.end(end_time=workflow.time_ns())


def ends(error: BaseException) -> bool:
    """Whether an exception ends what it leaves: a failure or a cancellation of the workflow.

    Anything else does not: the task is tried again, or the worker lets go of the workflow and closes its coroutines.
    """
    if isinstance(error, GeneratorExit) or not workflow.in_workflow():
        return False
    return is_cancelled_exception(error) or workflow.is_failure_exception(error)


def past(
    name: str, since_ns: int, attributes: Mapping[str, AttributeValue] | None = None, *, until_ns: int | None = None
) -> None:
    """A span of a wait that is over now, or was at `until_ns`, beneath the current one; none where it took no time.

    For waits whose end says what they were, and beside calls that carry the current span: what is called then hangs
    on the step and not on the wait. `since_ns` may be another machine's clock.
    """
    over = workflow.time_ns() if until_ns is None else until_ns
    if since_ns < over:
        TRACER.start_span(name, attributes=dict(attributes or {}), start_time=since_ns).end(end_time=over)


def answered(ended_ns: int, begun_ns: int) -> None:
    """The way back of a node's answer, given at `ended_ns`; 0 where the node makes no spans, and it is not known."""
    if ended_ns:
        past(WAIT_FOR_WORKER, max(begun_ns, ended_ns))


async def timed(name: str, call: Awaitable[ResultT]) -> ResultT:
    """Await a call; afterwards a span of it stands beneath the current one, see `past`."""
    since = workflow.time_ns()
    result = await call
    past(name, since)
    return result


def asked_ns() -> int:
    """When this run was asked for, by the server's clock: earlier than its first task if all workers were busy."""
    return (workflow.info().workflow_start_time - EPOCH) // timedelta(microseconds=1) * 1000


def instant(name: str, attributes: Mapping[str, AttributeValue]) -> None:
    """A span without length, for something that was decided and not done."""
    now = workflow.time_ns()
    TRACER.start_span(name, attributes=dict(attributes), start_time=now).end(end_time=now)


def fail(failed: Span, failure: Failure) -> None:
    """Mark a span as an error with its cause."""
    failed.set_attributes({"llmgw.reason": failure.reason.value, "error.type": failure.reason.value})
    failed.set_status(Status(StatusCode.ERROR, failure.line))


def traceparent(of: Span | None = None) -> str:
    """The W3C traceparent of a span (the current one by default); "" while tracing is off."""
    found = (of or trace.get_current_span()).get_span_context()
    if not found.is_valid:
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def searchable(parent: str) -> list[SearchAttributeUpdate[str]]:
    """The search attribute by which a trace's workflow is found; none where the trace is not recorded.

    Put it into an upsert that is made anyway, never into one of its own: whether tracing is on may differ between a
    workflow's run and its replay, and the commands must not.
    """
    trace_id = trace_id_of(parent)
    return [TRACE.value_set(trace_id)] if trace_id else []


def shown(parent: str) -> str:
    """For current details, at the end of what they say; empty where the trace is not recorded."""
    trace_id = trace_id_of(parent)
    return f"\n\ntrace `{trace_id}`" if trace_id else ""


def link(parent: str, attributes: Mapping[str, AttributeValue]) -> list[Link]:
    """A link to what a traceparent names; none for ""."""
    found = span_context(parent)
    return [Link(found, dict(attributes))] if found is not None else []


def span_context(parent: str) -> SpanContext | None:
    """What a traceparent names; None for "" or a text that is none."""
    parts = parent.split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return None
    try:
        trace_id, span_id, flags = int(parts[1], 16), int(parts[2], 16), int(parts[3], 16)
    except ValueError:
        return None
    found = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return found if found.is_valid else None


@contextmanager
def within(captured: Context) -> Iterator[None]:
    """Work in a context, such as that of the signal that said stop."""
    token = otel_context.attach(captured)
    try:
        yield
    finally:
        # When the worker lets go of a workflow, its coroutines are closed from elsewhere: the token then belongs to
        # a context that is gone, and there is nothing to restore.
        with suppress(ValueError):
            token.var.reset(token)

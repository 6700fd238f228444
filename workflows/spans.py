"""Spans inside workflows: true start times, the cause on errors, and contexts that travel as text.

Only the OpenTelemetry API is used. While tracing is off every span is the no-op one and `traceparent` is "".
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue
from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate
from temporalio.exceptions import is_cancelled_exception

from activities.contract import SEARCH_TRACE
from fleet.reasons import Failure, Reason
from fleet.trace_ids import trace_id_of

TRACER = trace.get_tracer("llmgw.workflows")

TRACE = SearchAttributeKey.for_keyword(SEARCH_TRACE)


@contextmanager
def span(
    name: str,
    attributes: Mapping[str, AttributeValue | str | int],
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """A span around a piece of a workflow; an exception that leaves it makes it an error with its cause.

    `start_ns` is nanoseconds since the epoch; the workflow's own time where it is not given, so that a replay gives
    the span its original start. Open it in `run` or what it calls, never in `__init__`, a query or a validator.
    """
    opened = TRACER.start_span(
        name,
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
        if is_cancelled_exception(error):
            fail(opened, Failure(reason=Reason.CANCELLED, detail="it was cancelled"))
        else:
            opened.set_status(Status(StatusCode.ERROR, str(error)))
        opened.end()
        raise
    opened.end()


def ends(error: BaseException) -> bool:
    """Whether an exception ends what it leaves: a failure or a cancellation of the workflow.

    Anything else does not: the task is tried again, or the worker lets go of the workflow and closes its coroutines.
    """
    if isinstance(error, GeneratorExit) or not workflow.in_workflow():
        return False
    return is_cancelled_exception(error) or workflow.is_failure_exception(error)


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

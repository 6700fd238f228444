"""Steps of the agent: one call opens a span and takes the time; a failure or cancellation becomes status and reason."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from fleet.metrics import NODE_STEP
from fleet.reasons import LlmgwError, Reason
from runtime.instruments import histogram

TRACER = trace.get_tracer("llmgw.agent")
TOOK = histogram(NODE_STEP)


@contextmanager
def step(
    name: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    root: bool = False,
) -> Iterator[Span]:
    """A span around a step, the current one inside; `root`: it begins a trace of its own."""
    with TRACER.start_as_current_span(
        name,
        context=Context() if root else None,
        kind=kind,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        began = time.monotonic()
        try:
            yield span
        except BaseException as error:
            reason = _fail(span, error)
            TOOK.record(time.monotonic() - began, {"llmgw.step": name, "error.type": reason.value})
            raise
        TOOK.record(time.monotonic() - began, {"llmgw.step": name})


def between(
    name: str, start_ns: int, end_ns: int, attributes: Mapping[str, AttributeValue], *, error: str = ""
) -> None:
    """A span beneath the current one of what began and ended before now, such as with somebody else.

    None without a current one: it would be a trace of its own, of nothing. None either where another machine's clock
    says that it ended before it began.
    """
    if start_ns < end_ns and trace.get_current_span().get_span_context().is_valid:
        span = TRACER.start_span(name, attributes=attributes, start_time=start_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ns)


def _fail(span: Span, error: BaseException) -> Reason:
    if isinstance(error, LlmgwError):
        reason, detail = error.failure.reason, error.failure.detail
    elif isinstance(error, asyncio.CancelledError):
        reason, detail = Reason.CANCELLED, "cancelled"  # left alone, it would look like a success
    else:
        reason, detail = Reason.INTERNAL, f"{type(error).__name__}: {error}"
    span.set_attributes({"llmgw.reason": reason.value, "error.type": reason.value})
    span.set_status(Status(StatusCode.ERROR, detail))
    return reason

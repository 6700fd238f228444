"""Spans of the agent: one call opens a step, and a failure or cancellation in it becomes its status and reason."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from fleet.reasons import LlmgwError, Reason

TRACER = trace.get_tracer("llmgw.agent")


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
        try:
            yield span
        except BaseException as error:
            _fail(span, error)
            raise


def _fail(span: Span, error: BaseException) -> None:
    if isinstance(error, LlmgwError):
        reason, detail = error.failure.reason, error.failure.detail
    elif isinstance(error, asyncio.CancelledError):
        reason, detail = Reason.CANCELLED, "cancelled"  # left alone, it would look like a success
    else:
        reason, detail = Reason.INTERNAL, f"{type(error).__name__}: {error}"
    span.set_attribute("llmgw.reason", reason.value)
    span.set_status(Status(StatusCode.ERROR, detail))

"""Spans as OTLP says them in JSON, read into values: pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.records import Record

SpanId = tuple[str, str]
"""Trace id and span id, both hex."""

STATUS_ERROR = 2  # opentelemetry.proto.trace.v1.Status.StatusCode


class Event(Record):
    """Something that happened within a span, such as a candidate turned down."""

    name: str
    time_ns: int = 0
    attributes: dict[str, Any] = {}


class Span(Record):
    """One finished span. Times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    name: str
    service: str = ""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = {}
    error: str | None = None
    """What went wrong; None where nothing did."""
    events: tuple[Event, ...] = ()
    links: tuple[SpanId, ...] = ()

    @property
    def id(self) -> SpanId:
        """Unique in all traces."""
        return (self.trace_id, self.span_id)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class SpanStore:
    """All spans that were read."""

    spans: dict[SpanId, Span] = field(default_factory=dict)
    broken_lines: int = 0
    """Lines that are no OTLP JSON, such as one that a killed process left half written."""

    def read(self, lines: Iterable[str]) -> None:
        """Take spans in. A span that was exported twice counts once, as it was last."""
        for line in lines:
            if not line.strip():
                continue
            try:
                self.add(otlp_spans(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                self.broken_lines += 1

    def add(self, spans: Iterable[Span]) -> None:
        """Take these in; one that is here already is replaced."""
        self.spans.update([(span.id, span) for span in spans])

    def latest(self, attribute: str, value: str) -> Span | None:
        """The youngest span with this attribute."""
        found = [span for span in self.spans.values() if span.attributes.get(attribute) == value]
        return max(found, key=lambda span: span.start_ns, default=None)


def otlp_spans(data: Mapping[str, Any]) -> Iterable[Span]:
    """The spans of an OTLP export in JSON. Anything else raises what a wrong shape raises: ValueError, KeyError,
    TypeError or AttributeError.
    """
    for resource in data["resourceSpans"]:
        service = _attributes(resource.get("resource", {})).get("service.name", "")
        for scope in resource["scopeSpans"]:
            for raw in scope["spans"]:
                yield _span(raw, str(service))


def _span(raw: Mapping[str, Any], service: str) -> Span:
    status = raw.get("status", {})
    events = tuple(
        Event(name=event.get("name", ""), time_ns=int(event.get("timeUnixNano", 0)), attributes=_attributes(event))
        for event in raw.get("events", ())
    )
    return Span(
        trace_id=raw["traceId"],
        span_id=raw["spanId"],
        parent_id=raw.get("parentSpanId", ""),
        name=raw["name"],
        service=service,
        start_ns=int(raw["startTimeUnixNano"]),
        end_ns=int(raw["endTimeUnixNano"]),
        attributes=_attributes(raw),
        error=_cause(status, events) if status.get("code", 0) == STATUS_ERROR else None,
        events=events,
        links=tuple((link["traceId"], link["spanId"]) for link in raw.get("links", ())),
    )


def _cause(status: Mapping[str, Any], events: tuple[Event, ...]) -> str:
    said = str(status.get("message", ""))
    thrown = [event.attributes.get("exception.message", "") for event in events if event.name == "exception"]
    return said or (str(thrown[-1]) if thrown else "")


def _attributes(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {item["key"]: _value(item.get("value", {})) for item in raw.get("attributes", ())}


def _value(raw: Mapping[str, Any]) -> Any:
    for kind, value in raw.items():
        match kind:
            case "intValue":
                return int(value)  # OTLP's JSON writes 64-bit numbers as text
            case "arrayValue":
                return [_value(item) for item in value.get("values", ())]
            case "kvlistValue":
                return _attributes({"attributes": value.get("values", ())})
            case _:
                return value
    return None

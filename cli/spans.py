"""Spans in OTLP JSON lines, and the tree they make with the links between traces followed: pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fleet.records import Record
from fleet.render import duration

SpanId = tuple[str, str]
"""Trace id and span id, both hex."""

STATUS_ERROR = 2  # opentelemetry.proto.trace.v1.Status.StatusCode

CUT_TEXT = 80
"""Characters of an attribute in a line of the tree; what went wrong is never cut."""

SHOWN = (
    "llmgw.state",
    "llmgw.detail",
    "llmgw.job",
    "llmgw.model",
    "llmgw.replica",
    "llmgw.node",
    "llmgw.engine",
    "llmgw.reason",
    "llmgw.weights.outcome",
    "llmgw.polls",
    "llmgw.shards",
    "llmgw.unclaimed",
    "llmgw.left_in_flight",
    "process.pid",
)
"""Attributes that a line of the tree shows, in this order; `--json` has all."""


class Event(Record):
    """Something that happened within a span, such as a candidate turned down."""

    name: str
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


class Relation(StrEnum):
    """How a span of the tree hangs on what stands above it."""

    ROOT = "root"
    CHILD = "child"
    LINKED = "linked"
    """In another trace: the span above links to it."""
    ORPHAN = "orphan"
    """Its parent has not ended yet, or was lost with a killed process."""


class TraceNode(Record):
    """A span with what stands beneath it: `ctl trace ID --json` is a list of these."""

    relation: Relation
    span: Span
    children: tuple["TraceNode", ...] = ()
    causes: tuple[SpanId, ...] = ()
    """What a root links to: where the trace came from."""


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
                found = list(_spans(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                self.broken_lines += 1
                continue
            self.spans.update((span.id, span) for span in found)

    def latest(self, attribute: str, value: str) -> Span | None:
        """The youngest span with this attribute."""
        found = [span for span in self.spans.values() if span.attributes.get(attribute) == value]
        return max(found, key=lambda span: span.start_ns, default=None)


def tree(store: SpanStore, trace_id: str) -> tuple[TraceNode, ...]:
    """One trace, the oldest root first. What an inner span links to in another trace is shown beneath it, once."""
    children: dict[SpanId, list[Span]] = {}
    for span in store.spans.values():
        if span.parent_id:
            children.setdefault((span.trace_id, span.parent_id), []).append(span)
    mine = [span for span in store.spans.values() if span.trace_id == trace_id]
    tops = [span for span in mine if not span.parent_id or (trace_id, span.parent_id) not in store.spans]
    made = _Tree(store, trace_id, children)
    return tuple(
        made.node(span, Relation.ORPHAN if span.parent_id else Relation.ROOT) for span in sorted(tops, key=_order)
    )


def trace_lines(roots: tuple[TraceNode, ...]) -> list[str]:
    """The tree as a person reads it: one line a span with its time, and what went wrong beneath it."""
    rows: list[tuple[str, str, str]] = []
    for root in roots:
        _rows(root, "", "", rows)
    width = max((len(label) for label, took, _ in rows if took), default=0)
    took_width = max((len(took) for _, took, _ in rows), default=0)
    return [f"{label:<{width}}  {took:>{took_width}}  {notes}".rstrip() for label, took, notes in rows]


def trace_id_of(traceparent: str) -> str:
    """The trace id in a W3C traceparent; empty where there is none."""
    fields = traceparent.split("-")
    return fields[1] if len(fields) == 4 and is_trace_id(fields[1]) else ""


def is_trace_id(text: str) -> bool:
    """32 lower case hex digits."""
    return len(text) == 32 and all(char in "0123456789abcdef" for char in text)


@dataclass
class _Tree:
    """One tree while it is built."""

    store: SpanStore
    trace_id: str
    children: Mapping[SpanId, list[Span]]
    seen: set[SpanId] = field(default_factory=set)

    def node(self, span: Span, relation: Relation) -> TraceNode:
        """The span with all that is not yet shown elsewhere."""
        self.seen.add(span.id)
        below = [
            self.node(child, Relation.CHILD)
            for child in sorted(self.children.get(span.id, []), key=_order)
            if child.id not in self.seen
        ]
        is_root = relation is Relation.ROOT
        for target in () if is_root else span.links:
            linked = self.store.spans.get(target)
            # What is in the trace itself has its own place there.
            if linked is not None and target not in self.seen and linked.trace_id != self.trace_id:
                below.append(self.node(linked, Relation.LINKED))
        return TraceNode(relation=relation, span=span, children=tuple(below), causes=span.links if is_root else ())


def _order(span: Span) -> tuple[int, int, str]:
    return (span.start_ns, -span.end_ns, span.span_id)


def _rows(node: TraceNode, lead: str, indent: str, rows: list[tuple[str, str, str]]) -> None:
    span = node.span
    mark = {Relation.LINKED: "⇢ ", Relation.ORPHAN: "… "}.get(node.relation, "")
    failed = "✗ " if span.error is not None else ""
    notes = " ".join(
        f"{key.removeprefix('llmgw.')}={_text(span.attributes[key])}" for key in SHOWN if key in span.attributes
    )
    if node.causes:
        notes += f" caused by trace {', '.join(sorted({trace for trace, _ in node.causes}))}"
    rows.append((f"{lead}{mark}{failed}{span.name}", duration(span.seconds), notes.strip()))
    details = [f"! {span.error}"] if span.error else []
    details += [f"· {_event(event)}" for event in span.events if event.name != "exception"]
    bar = "│  " if node.children else "   "
    rows.extend((f"{indent}{bar if indent or node.children else '   '}{detail}", "", "") for detail in details)
    for child in node.children:
        last = child is node.children[-1]
        _rows(child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), rows)


def _event(event: Event) -> str:
    return " ".join([event.name, *(f"{key.removeprefix('llmgw.')}={_text(v)}" for key, v in event.attributes.items())])


def _text(value: object) -> str:
    text = " ".join(str(value).split())
    text = text if len(text) <= CUT_TEXT else text[: CUT_TEXT - 1] + "…"
    return f'"{text}"' if " " in text else text


def _spans(data: Mapping[str, Any]) -> Iterable[Span]:
    for resource in data["resourceSpans"]:
        service = _attributes(resource.get("resource", {})).get("service.name", "")
        for scope in resource["scopeSpans"]:
            for raw in scope["spans"]:
                yield _span(raw, str(service))


def _span(raw: Mapping[str, Any], service: str) -> Span:
    status = raw.get("status", {})
    events = tuple(Event(name=event.get("name", ""), attributes=_attributes(event)) for event in raw.get("events", ()))
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

"""Spans as the tree they make, with the links between traces followed, and that tree as lines of text: pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cli.spans import Event, Span, SpanId, SpanStore
from fleet.records import Record
from fleet.render import duration

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


class Relation(StrEnum):
    """How a span of the tree hangs on what stands above it."""

    ROOT = "root"
    CHILD = "child"
    LINKED = "linked"
    """In another trace: the span above links to it."""
    EARLIER = "earlier"
    """The same, and over before this trace began, such as the start of what serves already: what stands beneath it is
    left to its own trace, for it took none of this one's time."""
    ORPHAN = "orphan"
    """Its parent has not ended yet, or was lost with a killed process."""


MARKS = {Relation.LINKED: "⇢ ", Relation.EARLIER: "⇠ ", Relation.ORPHAN: "… "}
"""Before the name of a span."""


class TraceNode(Record):
    """A span with what stands beneath it: `ctl trace ID --json` is a list of these."""

    relation: Relation
    span: Span
    children: tuple["TraceNode", ...] = ()
    causes: tuple[SpanId, ...] = ()
    """What a root links to: where the trace came from."""


def tree(store: SpanStore, trace_id: str) -> tuple[TraceNode, ...]:
    """One trace, the oldest root first. What an inner span links to in another trace is shown beneath it, once."""
    children: dict[SpanId, list[Span]] = {}
    for span in store.spans.values():
        if span.parent_id:
            children.setdefault((span.trace_id, span.parent_id), []).append(span)
    mine = [span for span in store.spans.values() if span.trace_id == trace_id]
    tops = [span for span in mine if not span.parent_id or (trace_id, span.parent_id) not in store.spans]
    made = _Tree(store, trace_id, children, min((span.start_ns for span in tops), default=0))
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


@dataclass
class _Tree:
    """One tree while it is built."""

    store: SpanStore
    trace_id: str
    children: Mapping[SpanId, list[Span]]
    began_ns: int
    """When the trace began."""
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
                below.append(self._linked(linked))
        return TraceNode(relation=relation, span=span, children=tuple(below), causes=span.links if is_root else ())

    def _linked(self, span: Span) -> TraceNode:
        if span.end_ns > self.began_ns:
            return self.node(span, Relation.LINKED)
        self.seen.add(span.id)
        return TraceNode(relation=Relation.EARLIER, span=span)


def _order(span: Span) -> tuple[int, int, str]:
    return (span.start_ns, -span.end_ns, span.span_id)


def _rows(node: TraceNode, lead: str, indent: str, rows: list[tuple[str, str, str]]) -> None:
    span = node.span
    mark = MARKS.get(node.relation, "")
    failed = "✗ " if span.error is not None else ""
    notes = " ".join(
        f"{key.removeprefix('llmgw.')}={_text(span.attributes[key])}" for key in SHOWN if key in span.attributes
    )
    if node.causes:
        notes += f" caused by trace {', '.join(sorted({trace for trace, _ in node.causes}))}"
    rows.append((f"{lead}{mark}{failed}{span.name}", duration(span.seconds), notes.strip()))
    details = [f"! {span.error}"] if span.error else []
    details += [f"· {event_text(event)}" for event in span.events if event.name != "exception"]
    bar = "│  " if node.children else "   "
    rows.extend((f"{indent}{bar if indent or node.children else '   '}{detail}", "", "") for detail in details)
    for child in node.children:
        last = child is node.children[-1]
        _rows(child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), rows)


def event_text(event: Event) -> str:
    """`turned down by n1 reason=memory need=42`."""
    return " ".join([event.name, *(f"{key.removeprefix('llmgw.')}={_text(v)}" for key, v in event.attributes.items())])


def _text(value: object) -> str:
    text = " ".join(str(value).split())
    text = text if len(text) <= CUT_TEXT else text[: CUT_TEXT - 1] + "…"
    return f'"{text}"' if " " in text else text

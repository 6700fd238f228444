"""A trace as a waterfall in the terminal: the tree on the left, each span's time as a bar on one common axis."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.span_tree import MARKS, Relation, TraceNode, event_text
from cli.wall_time import Interval, bounds, itself, root_cause, shares
from fleet.render import duration

WIDEST = 140
"""Columns: wider, the eye loses the line, and a pipe has no width."""
MIN_BAR, NAME_SHARE = 12, 0.5
"""Columns the bars have at least, and the part of a line that names may take."""
GAP_SHARE = 0.05
"""Of the whole time: what a span spends in itself is shown as a line of its own from here on."""
TOLD_SHARES = 4
"""Lines of where the time went; the rest is one more line."""
LABELS = ("llmgw.replica", "llmgw.node", "llmgw.weights.outcome", "llmgw.engine", "llmgw.model", "gen_ai.request.model")
"""What a name is followed by: the first of these that the span has and the span above it has not."""

SERVICE_STYLES = ("cyan", "green", "magenta", "blue", "yellow")
ERROR_STYLE, QUIET_STYLE = "red", "dim"


@dataclass(frozen=True)
class Limits:
    """What of a trace is shown."""

    depth: int | None = None
    """Levels beneath a root; None: all."""
    shortest_s: float = 0.0
    """Spans that took less are left out with what is beneath them, unless something in them failed."""


@dataclass(frozen=True)
class Line:
    """One line of the waterfall."""

    indent: str
    name: str
    label: str = ""
    style: str = ""
    took_ns: int | None = None
    bars: tuple[Interval, ...] = ()
    bar: str = "━"
    notes: tuple[tuple[str, str], ...] = ()
    """Lines beneath it, each with its style."""
    beneath: str = ""
    """The indent of its notes."""


def print_waterfall(console: Console, roots: Sequence[TraceNode], limits: Limits) -> None:
    """Draw a trace, then say where its time went, and what went wrong."""
    whole = bounds(roots)
    console.print(_drawn(_lines(roots, whole, limits), whole, min(console.width, WIDEST)))
    for text in summary(roots, whole):
        console.print(text, soft_wrap=True)


def summary(roots: Sequence[TraceNode], whole: Interval) -> Iterator[Text]:
    """Where the time went, by the names of the spans that were at work; then the first cause of a failure."""
    total = whole[1] - whole[0]
    if total > 0:
        told = shares(roots, whole)
        parts = [
            f"{share.name if share.leaf else f'in {share.name} itself'} {_took(share.nanoseconds)} "
            f"({share.nanoseconds / total:.0%})"
            for share in told[:TOLD_SHARES]
        ]
        rest = sum(share.nanoseconds for share in told[TOLD_SHARES:])
        if rest:
            parts.append(f"{len(told) - TOLD_SHARES} more {_took(rest)} ({rest / total:.0%})")
        yield Text(f"{_took(total)}: {', '.join(parts)}")
    cause = root_cause(roots)
    if cause is not None:
        where = f" on {cause.attributes['llmgw.node']}" if "llmgw.node" in cause.attributes else ""
        yield Text(f"why: {cause.name}{where}: {cause.error or 'failed'}", style=ERROR_STYLE)


def label(attributes: Mapping[str, object], above: Mapping[str, object]) -> str:
    """What a span's name is followed by: what it is about, where the span above it does not say so already."""
    for key in LABELS:
        if key in attributes and attributes[key] != above.get(key):
            return str(attributes[key])
    return ""


@dataclass
class _Styles:
    """A colour for each service, in the order they come."""

    given: dict[str, str] = field(default_factory=dict)

    def of(self, node: TraceNode) -> str:
        if node.span.error is not None:
            return ERROR_STYLE
        return self.given.setdefault(node.span.service, SERVICE_STYLES[len(self.given) % len(SERVICE_STYLES)])


def _lines(roots: Sequence[TraceNode], whole: Interval, limits: Limits) -> list[Line]:
    styles = _Styles()
    gap = int((whole[1] - whole[0]) * GAP_SHARE)
    lines: list[Line] = []
    for root in roots:
        lines += _node_lines(root, "", "", {}, styles, gap, limits, 0)
    return lines


def _node_lines(
    node: TraceNode,
    lead: str,
    indent: str,
    above: dict[str, object],
    styles: _Styles,
    gap: int,
    limits: Limits,
    depth: int,
) -> Iterator[Line]:
    span = node.span
    mark = MARKS.get(node.relation, "")
    shown = [child for child in node.children if _is_shown(child, limits, depth + 1)]
    alone = itself(node)
    has_gap = bool(alone) and sum(end - start for start, end in alone) >= gap and bool(shown)
    bar = "│ " if shown else "  "
    yield Line(
        indent=lead,
        name=f"{mark}{'✗ ' if span.error is not None else ''}{span.name}",
        label=label(span.attributes, above),
        style=styles.of(node),
        took_ns=span.end_ns - span.start_ns,
        bars=((span.start_ns, span.end_ns),) if node.relation is not Relation.EARLIER else (),
        notes=tuple(_notes(node)),
        beneath=indent + bar,
    )
    if has_gap:
        yield Line(
            indent=f"{indent}├─ ",
            name="(itself)",
            style=QUIET_STYLE,
            took_ns=sum(end - start for start, end in alone),
            bars=alone,
            bar="╌",
        )
    hidden = len(node.children) - len(shown)
    for child in shown:
        last = child is shown[-1] and not hidden
        yield from _node_lines(
            child,
            indent + ("└─ " if last else "├─ "),
            indent + ("   " if last else "│  "),
            {**above, **span.attributes},
            styles,
            gap,
            limits,
            depth + 1,
        )
    if hidden:
        yield Line(indent=f"{indent}└─ ", name=f"({hidden} more)", style=QUIET_STYLE)


def _is_shown(node: TraceNode, limits: Limits, depth: int) -> bool:
    if limits.depth is not None and depth > limits.depth:
        return False
    return node.span.seconds >= limits.shortest_s or _failed(node)


def _failed(node: TraceNode) -> bool:
    return node.span.error is not None or any(map(_failed, node.children))


def _notes(node: TraceNode) -> Iterator[tuple[str, str]]:
    if node.causes:
        yield f"caused by trace {', '.join(sorted({trace for trace, _ in node.causes}))}", QUIET_STYLE
    if node.span.error:
        yield f"! {node.span.error}", ERROR_STYLE
    for event in node.span.events:
        if event.name != "exception":
            yield f"· {event_text(event)}", QUIET_STYLE


def _drawn(lines: Sequence[Line], whole: Interval, width: int) -> RenderableType:
    took_width = max((len(_took(line.took_ns)) for line in lines if line.took_ns is not None), default=0)
    longest = max((len(line.indent) + len(line.name) + len(line.label) + 1 for line in lines), default=0)
    name_width = max(8, min(longest, int(width * NAME_SHARE), width - took_width - MIN_BAR - 4))
    bar_width = max(MIN_BAR, width - name_width - took_width - 4)
    parts: list[RenderableType] = []
    for line in lines:
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=name_width, no_wrap=True)
        row.add_column(width=took_width, no_wrap=True, justify="right")
        row.add_column(width=bar_width, no_wrap=True)
        took = _took(line.took_ns) if line.took_ns is not None else ""
        row.add_row(_name(line, name_width), Text(took), Text(_bar(line, whole, bar_width), style=line.style))
        parts.append(row)
        for note, style in line.notes:
            parts.append(Text(f"{line.beneath}{' '.join(note.split())}", style=style, overflow="fold"))
    return Group(*parts)


def _name(line: Line, width: int) -> Text:
    text = Text()
    text.append(line.indent, style=QUIET_STYLE)
    text.append(line.name, style=line.style)
    if line.label:
        text.append(f" {line.label}", style=QUIET_STYLE)
    text.truncate(width, overflow="ellipsis")
    return text


def _bar(line: Line, whole: Interval, width: int) -> str:
    """Cells of the axis that the line's intervals touch; an instant has one."""
    total = max(1, whole[1] - whole[0])
    cells = [" "] * width
    for start, end in line.bars:
        first = min(width - 1, (start - whole[0]) * width // total)
        last = max(first, min(width - 1, -(-(end - whole[0]) * width // total) - 1))
        short = end - start < total / width / 2
        cells[first : last + 1] = ["╸" if short and line.bar == "━" else line.bar] * (last - first + 1)
    return "".join(cells).rstrip()


def _took(nanoseconds: int) -> str:
    return duration(nanoseconds / 1e9)

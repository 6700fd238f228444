"""A trace as one HTML file: it needs no network, and nothing that a span says can run in it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from rich.text import Text

from cli.span_tree import MARKS, Relation, TraceNode
from cli.wall_time import bounds, walk
from cli.waterfall import label, summary
from fleet.render import duration

TEMPLATE = Path(__file__).with_name("trace_page.html")

COLOURS = 6
"""Classes `s0` to `s5` of the template, given to the services in the order they come."""


def page(title: str, roots: Sequence[TraceNode]) -> str:
    """The whole file. All text of spans is escaped; the page's policy lets only its own script run."""
    start, end = bounds(roots)
    services: dict[str, int] = {}
    rows = "".join(_rows(roots, (start, max(1, end - start)), services, 0, {}))
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    script = re.search(r"<script>(.*?)</script>", template.template, re.DOTALL)
    if script is None:
        raise ValueError(f"{TEMPLATE} has no script")
    return template.substitute(
        title=escape(title),
        script_hash=base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode(),
        total=escape(duration((end - start) / 1e9)),
        total_ns=max(1, end - start),
        count=sum(1 for _ in walk(roots)),
        legend="".join(
            f'<span class="s{number % COLOURS}">{escape(name or "unnamed")}</span>' for name, number in services.items()
        ),
        summary="".join(_summary(line) for line in summary(roots, (start, end))),
        rows=rows,
    )


def _summary(line: Text) -> str:
    failed = ' class="error"' if line.style else ""
    return f"<p{failed}>{escape(line.plain)}</p>"


def _rows(
    nodes: Sequence[TraceNode],
    axis: tuple[int, int],
    services: dict[str, int],
    depth: int,
    above: dict[str, object],
) -> Iterator[str]:
    for node in nodes:
        yield from _row(node, axis, services, depth, above)
        inside = {**above, **node.span.attributes}
        yield from _rows(node.children, axis, services, depth + 1, inside)


def _row(
    node: TraceNode, axis: tuple[int, int], services: dict[str, int], depth: int, above: dict[str, object]
) -> Iterator[str]:
    span = node.span
    zero, total = axis
    number = services.setdefault(span.service, len(services))
    mark = MARKS.get(node.relation, "")
    classes = ["row", f"s{number % COLOURS}", *(["failed"] if span.error is not None else [])]
    begin, end = (0, 0) if node.relation is Relation.EARLIER else (span.start_ns - zero, span.end_ns - zero)
    place = f"--d:{depth};--s:{begin / total:.6f};--e:{end / total:.6f}"
    twist = '<button class="twist" aria-label="fold">▾</button>' if node.children else '<i class="twist"></i>'
    ticks = "".join(
        f'<i class="tick" style="--s:{(event.time_ns - zero) / total:.6f}"></i>'
        for event in span.events
        if zero <= event.time_ns <= zero + total
    )
    yield (
        f'<div class="{" ".join(classes)}" id="{_anchor(*span.id)}" data-depth="{depth}" tabindex="0"'
        f' style="{place}"><div class="name">{twist}<b>{mark}{escape(span.name)}</b>'
        f"<small>{escape(label(span.attributes, above))}</small></div>"
        f'<div class="took">{escape(duration(span.seconds))}</div>'
        f'<div class="axis"><i class="bar"></i>{ticks}</div></div>'
    )
    yield f'<div class="more" hidden>{"".join(_details(node))}</div>'


def _details(node: TraceNode) -> Iterator[str]:
    span = node.span
    if span.error is not None:
        yield f'<p class="error">{escape(span.error or "failed")}</p>'
    facts = {
        "service": span.service,
        "trace id": span.trace_id,
        "span id": span.span_id,
        **{key: _text(value) for key, value in sorted(span.attributes.items())},
    }
    yield "<dl>"
    yield from (f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    yield "</dl>"
    for event in span.events:
        said = " ".join(f"{key}={_text(value)}" for key, value in event.attributes.items())
        after = duration(max(0, event.time_ns - span.start_ns) / 1e9) if event.time_ns else ""
        yield f"<p>· {escape(event.name)} <small>{escape(after)} {escape(said)}</small></p>"
    for trace_id, span_id in span.links:
        yield f'<p>⇢ <a href="#{_anchor(trace_id, span_id)}">trace {escape(trace_id)} span {escape(span_id)}</a></p>'


def _anchor(trace_id: str, span_id: str) -> str:
    return escape(f"{trace_id}-{span_id}", quote=True)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Where the time of a trace went, and what went wrong first: pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from cli.span_tree import Relation, TraceNode
from cli.spans import Span

Interval = tuple[int, int]
"""Start and end, nanoseconds since the epoch."""


@dataclass(frozen=True)
class Share:
    """Wall time that one kind of span accounts for."""

    name: str
    """Of the span that was at work; of one with spans beneath it, the time in which none of them was."""
    nanoseconds: int
    leaf: bool
    """Whether it has nothing beneath it, so that its name says what was waited for."""


def bounds(roots: Iterable[TraceNode]) -> Interval:
    """From the first start to the last end of all that is shown but what was over before; (0, 0) where there is
    nothing."""
    spans = [node.span for node in walk(roots) if node.relation is not Relation.EARLIER]
    return min((span.start_ns for span in spans), default=0), max((span.end_ns for span in spans), default=0)


def walk(roots: Iterable[TraceNode]) -> Iterator[TraceNode]:
    """Every node, parents before their children."""
    for node in roots:
        yield node
        yield from walk(node.children)


def shares(roots: Iterable[TraceNode], within: Interval) -> tuple[Share, ...]:
    """How `within` divides over the spans, the largest share first.

    Each moment counts once: for an open span with nothing beneath it if there is one, of several for the deepest, and
    at the same depth for the one that began last. Moments in which no span is open are missing.
    """
    found: dict[tuple[str, bool], int] = {}
    for node, (start, end) in _at_work(roots, within):
        key = (node.span.name, not node.children)
        found[key] = found.get(key, 0) + end - start
    made = [Share(name, taken, leaf) for (name, leaf), taken in found.items()]
    return tuple(sorted(made, key=lambda share: (-share.nanoseconds, share.name)))


def covered(roots: Iterable[TraceNode], within: Interval) -> float:
    """The share (0 to 1) of `within` in which a span without spans beneath it is open: time whose name is known."""
    length = within[1] - within[0]
    if length <= 0:
        return 1.0
    return sum(share.nanoseconds for share in shares(roots, within) if share.leaf) / length


def itself(node: TraceNode) -> tuple[Interval, ...]:
    """The parts of a span in which nothing beneath it is open; of a span with nothing beneath it, none."""
    if not node.children:
        return ()
    left: list[Interval] = []
    at = node.span.start_ns
    for start, end in sorted((child.span.start_ns, child.span.end_ns) for child in walk(node.children)):
        if start > at:
            left.append((at, min(start, node.span.end_ns)))
        at = max(at, end)
        if at >= node.span.end_ns:
            break
    if at < node.span.end_ns:
        left.append((at, node.span.end_ns))
    return tuple(left)


def root_cause(roots: Iterable[TraceNode]) -> Span | None:
    """The failed span that explains the others: from the last root that failed, down along what failed last in it.

    A failure that was made good does not count, since the span above it is no error.
    """
    found = None
    level = [node for node in roots if node.span.error is not None]
    while level:
        node = max(level, key=lambda one: (one.span.end_ns, one.span.start_ns))
        found = node.span
        level = [child for child in node.children if child.span.error is not None]
    return found


def _at_work(roots: Iterable[TraceNode], within: Interval) -> Iterator[tuple[TraceNode, Interval]]:
    """For each piece of the interval between two edges, the span it counts for; pieces without any are left out."""
    low, high = within
    open_spans = [
        (depth, node.span.start_ns, index, node)
        for index, (depth, node) in enumerate(_with_depth(roots, 0))
        if node.span.end_ns > low and node.span.start_ns < high
    ]
    edges = sorted(
        {low, high}
        | {edge for _, _, _, node in open_spans for edge in (node.span.start_ns, node.span.end_ns) if low < edge < high}
    )
    starts = sorted(open_spans, key=lambda one: one[1])
    active: list[tuple[int, int, int, TraceNode]] = []
    next_start = 0
    for start, end in pairwise(edges):
        while next_start < len(starts) and starts[next_start][1] <= start:
            active.append(starts[next_start])
            next_start += 1
        active = [one for one in active if one[3].span.end_ns > start]
        if active:
            yield max(active, key=lambda one: (not one[3].children, *one[:3]))[3], (start, end)


def _with_depth(roots: Iterable[TraceNode], depth: int) -> Iterator[tuple[int, TraceNode]]:
    for node in roots:
        yield depth, node
        yield from _with_depth(node.children, depth + 1)

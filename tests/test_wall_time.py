"""Where the time of a trace went, and what explains a failure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.span_tree import TraceNode, tree
from cli.wall_time import bounds, covered, itself, root_cause, shares
from tests.otlp import SECOND, line, span, store

JOB = "a" * 32
PASS = "b" * 32


def one(*spans: object) -> tuple[TraceNode, ...]:
    return tree(store(line(*spans)), JOB)  # type: ignore[arg-type]


def told(roots: tuple[TraceNode, ...]) -> list[tuple[str, float, bool]]:
    return [(share.name, share.nanoseconds / SECOND, share.leaf) for share in shares(roots, bounds(roots))]


def test_time_belongs_to_what_was_at_work_and_the_rest_to_the_span_itself() -> None:
    roots = one(
        span(JOB, 1, 0, "serve model", 0, 10),
        span(JOB, 2, 1, "mirror", 1, 4),
        span(JOB, 3, 1, "check", 6, 10),
    )
    assert told(roots) == [("check", 4, True), ("mirror", 3, True), ("serve model", 3, False)]
    assert covered(roots, bounds(roots)) == 0.7
    assert itself(roots[0]) == ((0, SECOND), (4 * SECOND, 6 * SECOND))


def test_of_two_at_once_the_deeper_counts_and_no_moment_counts_twice() -> None:
    roots = one(
        span(JOB, 1, 0, "serve model", 0, 4),
        span(JOB, 2, 1, "placement", 0, 4),
        span(JOB, 3, 2, "fetch weights", 1, 3),
        span(JOB, 4, 1, "watch", 0, 4),
    )
    assert told(roots) == [("fetch weights", 2, True), ("watch", 2, True)]
    assert covered(roots, bounds(roots)) == 1.0


def test_a_linked_start_counts_where_it_is_shown() -> None:
    spans = store(
        line(
            span(JOB, 1, 0, "serve model", 0, 5),
            span(JOB, 2, 1, "placement", 0, 5, links=((PASS, 9),)),
            span(PASS, 9, 8, "start replica", 1, 5),
        )
    )
    roots = tree(spans, JOB)
    assert told(roots) == [("start replica", 4, True), ("placement", 1, False)]


def test_nothing_is_nothing() -> None:
    assert bounds(()) == (0, 0)
    assert shares((), (0, 0)) == ()
    assert covered((), (0, 0)) == 1.0
    assert covered((), (0, 10)) == 0.0
    assert root_cause(()) is None


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12),
    st.integers(0, 25),
    st.integers(26, 60),
)
def test_shares_never_exceed_the_interval_and_agree_with_a_count_of_moments(
    raw: list[tuple[int, int, int]], low: int, high: int
) -> None:
    spans = [
        span(JOB, number + 1, min(parent, number), f"s{number}", min(start, end), max(start, end))
        for number, (parent, start, end) in enumerate(raw)
    ]
    roots = one(*spans)
    within = (low * SECOND, high * SECOND)
    found = shares(roots, within)
    open_moments = sum(
        any(min(start, end) <= moment < max(start, end) for _, start, end in raw) for moment in range(low, high)
    )
    assert sum(share.nanoseconds for share in found) == open_moments * SECOND
    parents = {min(parent, number) for number, (parent, _, _) in enumerate(raw)}
    leaves = [(min(s, e), max(s, e)) for number, (_, s, e) in enumerate(raw) if number + 1 not in parents]
    leaf_moments = sum(any(start <= moment < end for start, end in leaves) for moment in range(low, high))
    assert covered(roots, within) == pytest.approx(leaf_moments / (high - low))


def test_the_cause_is_the_deepest_failure_of_the_last_try() -> None:
    roots = one(
        span(JOB, 1, 0, "serve model", 0, 9, error="exited: too often"),
        span(JOB, 2, 1, "placement", 0, 9, error="exited: too often"),
        span(JOB, 3, 2, "start replica", 0, 2, error="port_in_use"),
        span(JOB, 4, 3, "launch engine", 0, 2, error="port_in_use: 21000"),
        span(JOB, 5, 2, "start replica", 3, 8, error="exited"),
        span(JOB, 6, 5, "wait for engine", 3, 8, error="exited: exit code 1: invalid magic"),
    )
    cause = root_cause(roots)
    assert cause is not None
    assert (cause.name, cause.error) == ("wait for engine", "exited: exit code 1: invalid magic")


def test_what_was_made_good_is_no_cause() -> None:
    roots = one(
        span(JOB, 1, 0, "serve model", 0, 9),
        span(JOB, 2, 1, "placement", 0, 9),
        span(JOB, 3, 2, "start replica", 0, 2, error="port_in_use"),
    )
    assert root_cause(roots) is None

"""The waterfall that `ctl trace` draws."""

import io

from rich.console import Console

from cli.span_tree import trace_lines, tree
from cli.trace_page import page
from cli.waterfall import Limits, print_waterfall
from tests.otlp import line, span, store

JOB = "a" * 32
PASS = "b" * 32

SERVED = store(
    line(
        span(JOB, 1, 0, "serve model", 0.0, 2.0, llmgw__model="m"),
        span(JOB, 2, 1, "registry", 0.0, 0.02, llmgw__model="m"),
        span(JOB, 3, 1, "placement", 0.5, 2.0, links=((PASS, 13),)),
        span(PASS, 13, 12, "start replica", 0.5, 2.0, llmgw__replica="m-0"),
    ),
    line(span(PASS, 16, 13, "fetch weights", 0.5, 1.0, llmgw__weights__outcome="mirror"), service="llmgw-agent"),
)

FAILED = store(
    line(
        span(JOB, 1, 0, "serve model", 0.0, 1.0, error="bad_flag: no such flag"),
        span(
            JOB,
            2,
            1,
            "place",
            0.0,
            0.1,
            events=({"name": "turned down by n1", "attributes": [{"key": "llmgw.need", "value": {"intValue": "7"}}]},),
        ),
        span(JOB, 3, 1, "start shard", 0.1, 1.0, error="bad_flag: no such flag", llmgw__node="n2"),
    )
)


ALL = Limits()


def drawn(spans: object, limits: Limits = ALL, width: int = 60, *, colour: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    print_waterfall(console, tree(spans, JOB), limits)  # type: ignore[arg-type]
    return "\n".join(text.rstrip() for text in file.getvalue().splitlines())


def test_bars_stand_on_one_axis_and_links_are_followed() -> None:
    *lines, time = drawn(SERVED).splitlines()
    assert lines == [
        "serve model m                   2.0 s  ━━━━━━━━━━━━━━━━━━━━━",
        "├─ (itself)                    480 ms  ╌╌╌╌╌╌",
        "├─ registry                     20 ms  ╸",
        "└─ placement                    1.5 s       ━━━━━━━━━━━━━━━━",
        "   └─ ⇢ start replica m-0       1.5 s       ━━━━━━━━━━━━━━━━",
        "      ├─ (itself)               1.0 s            ╌╌╌╌╌╌╌╌╌╌╌",
        "      └─ fetch weights mirror  500 ms       ━━━━━━",
    ]
    assert time == (
        "2.0 s: in start replica itself 1.0 s (50%), fetch weights 500 ms (25%), in serve model itself 480 ms (24%), "
        "registry 20 ms (1%)"
    )


def test_what_was_over_before_takes_none_of_the_time() -> None:
    """A model that serves already is served again, a day after its replica was started."""
    day = 86400.0
    again = store(
        line(
            span(JOB, 1, 0, "serve model", day, day + 2.0, llmgw__model="m"),
            span(JOB, 3, 1, "placement", day, day + 2.0, links=((PASS, 13),)),
            span(PASS, 13, 12, "start replica", 0.5, 2.0, llmgw__replica="m-0"),
            span(PASS, 16, 13, "fetch weights", 0.5, 1.0),
        )
    )
    assert drawn(again, width=90).splitlines() == [
        f"serve model m              2.0 s  {'━' * 56}",
        f"└─ placement               2.0 s  {'━' * 56}",
        f"   ├─ (itself)             2.0 s  {'╌' * 56}",
        "   └─ ⇠ start replica m-0  1.5 s",
        "2.0 s: in placement itself 2.0 s (100%)",
    ]
    shown = page("job", tree(again, JOB))
    assert "--d:2;--s:0.000000;--e:0.000000" in shown
    assert trace_lines(tree(again, JOB))[-1] == "   └─ ⇠ start replica  1.5 s  replica=m-0"


def test_a_failure_has_its_cause_beneath_it_and_at_the_end() -> None:
    assert (
        drawn(FAILED)
        == """\
✗ serve model         1.0 s  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
│ ! bad_flag: no such flag
├─ place             100 ms  ━━━━
│    · turned down by n1 need=7
└─ ✗ start shard n2  900 ms     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━
     ! bad_flag: no such flag
1.0 s: start shard 900 ms (90%), place 100 ms (10%)
why: start shard on n2: bad_flag: no such flag"""
    )


def test_limits_leave_out_what_is_deep_or_short_and_never_what_failed() -> None:
    assert [text.split("  ")[0] for text in drawn(SERVED, Limits(depth=1)).splitlines()[:4]] == [
        "serve model m",
        "├─ (itself)",
        "├─ registry",
        "└─ placement",
    ]
    short = drawn(SERVED, Limits(shortest_s=0.1))
    assert "registry  " not in short
    assert "└─ (1 more)" in short
    assert "start shard" in drawn(FAILED, Limits(shortest_s=60.0))


def test_a_narrow_terminal_cuts_names_and_keeps_bars() -> None:
    lines = drawn(SERVED, width=40).splitlines()[:-1]
    assert all(len(text) <= 40 for text in lines)
    assert any("…" in text for text in lines)
    assert lines[0].endswith("━" * 12)


def test_colour_only_where_the_terminal_has_it() -> None:
    assert "\x1b[" not in drawn(FAILED)
    assert "\x1b[31m✗ start shard" in drawn(FAILED, colour=True)


def test_markup_in_a_span_is_text() -> None:
    hostile = store(line(span(JOB, 1, 0, "[red]serve[/red]", 0, 1, error="[bold]no[/bold]")))
    assert "[red]serve[/red]" in drawn(hostile, width=80)
    assert "! [bold]no[/bold]" in drawn(hostile, width=80)

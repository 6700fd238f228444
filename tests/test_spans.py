"""The tree that `ctl trace` shows, from OTLP JSON lines."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, set_span_in_context
from temporalio.contrib.opentelemetry import OpenTelemetryPlugin

from cli.span_tree import Relation, TraceNode, trace_lines, tree
from fleet.trace_ids import is_trace_id, trace_id_of
from runtime.config import TracingConfig
from runtime.temporal import plugins
from runtime.tracing import install, make_provider
from tests.otlp import line, span, store

JOB = "a" * 32
PASS = "b" * 32


SERVED = store(
    # Exported as they end: children first.
    line(
        span(JOB, 2, 1, "registry", 0.0, 0.012, llmgw__state="done", llmgw__detail="1 file, 94 MiB"),
        span(JOB, 3, 1, "placement", 0.1, 1.6, links=((PASS, 13),), llmgw__state="done"),
    ),
    line(span(JOB, 1, 0, "serve model", 0.0, 2.0, llmgw__job="job/serve/m/1", llmgw__model="m")),
    line(
        span(PASS, 12, 11, "place", 0.2, 0.25, llmgw__node="n1"),
        span(PASS, 11, 10, "scale up", 0.2, 0.26),
        span(PASS, 10, 0, "reconcile", 0.15, 0.27, links=((JOB, 1),)),
        span(PASS, 14, 13, "send start", 0.3, 0.31),
        span(PASS, 13, 12, "start replica", 0.3, 1.5, llmgw__replica="m-0"),
    ),
    line(
        span(PASS, 16, 15, "fetch weights", 0.32, 0.5, llmgw__weights__outcome="mirror"),
        span(PASS, 17, 15, "wait for engine", 0.6, 1.4),
        span(PASS, 15, 14, "start shard", 0.31, 1.45, llmgw__node="n1"),
        service="llmgw-agent",
    ),
)


def test_a_job_shows_its_steps_and_the_start_they_link_to() -> None:
    assert trace_lines(tree(SERVED, JOB)) == [
        "serve model                      2.0 s  job=job/serve/m/1 model=m",
        '├─ registry                      12 ms  state=done detail="1 file, 94 MiB"',
        "└─ placement                     1.5 s  state=done",
        "   └─ ⇢ start replica            1.2 s  replica=m-0",
        "      └─ send start              10 ms",
        "         └─ start shard          1.1 s  node=n1",
        "            ├─ fetch weights    180 ms  weights.outcome=mirror",
        "            └─ wait for engine  800 ms",
    ]


def test_a_pass_names_what_caused_it_and_does_not_show_it() -> None:
    lines = trace_lines(tree(SERVED, PASS))
    assert lines[0] == f"reconcile                          120 ms  caused by trace {JOB}"
    assert lines[2].split()[:2] == ["└─", "place"]
    assert not any("serve model" in line for line in lines)


def test_a_failed_start_shows_its_cause_and_the_candidates_turned_down() -> None:
    found = store(
        line(
            span(JOB, 3, 2, "launch engine", 0.1, 0.5, error="exited: code 1: invalid magic"),
            span(
                JOB,
                2,
                1,
                "start shard",
                0.0,
                0.6,
                error="",
                events=(
                    {
                        "name": "candidate refused",
                        "attributes": [
                            {"key": "reason", "value": {"stringValue": "memory"}},
                            {"key": "need", "value": {"intValue": "42"}},
                        ],
                    },
                    {
                        "name": "exception",
                        "attributes": [
                            {"key": "exception.message", "value": {"stringValue": "weights_corrupt: invalid magic"}},
                        ],
                    },
                ),
            ),
            span(JOB, 1, 0, "serve model", 0.0, 0.7),
        )
    )
    assert trace_lines(tree(found, JOB)) == [
        "serve model            700 ms",
        "└─ ✗ start shard       600 ms",
        "   │  ! weights_corrupt: invalid magic",
        "   │  · candidate refused reason=memory need=42",
        "   └─ ✗ launch engine  400 ms",
        "         ! exited: code 1: invalid magic",
    ]


def test_a_span_exported_twice_counts_once_as_it_was_last() -> None:
    found = store(line(span(JOB, 1, 0, "serve model", 0, 1)), line(span(JOB, 1, 0, "serve model", 0, 3)))
    [root] = tree(found, JOB)
    assert root.span.seconds == 3.0


def test_a_span_whose_parent_has_not_ended_is_shown_as_such() -> None:
    [root] = tree(store(line(span(JOB, 2, 1, "registry", 0, 1))), JOB)
    assert root.relation is Relation.ORPHAN
    assert trace_lines((root,)) == ["… registry  1.0 s"]


def test_links_that_lead_in_a_circle_end() -> None:
    found = store(
        line(
            span(JOB, 1, 0, "root", 0, 9),
            span(JOB, 2, 1, "inner", 1, 8, links=((PASS, 1), (JOB, 1), (JOB, 2))),
            span(PASS, 1, 0, "other", 2, 3),
            span(PASS, 2, 1, "deep", 2, 3, links=((JOB, 2),)),
        )
    )
    assert [text.split()[-3] for text in trace_lines(tree(found, JOB))] == ["root", "inner", "other", "deep"]


def test_broken_lines_are_counted_and_left_out() -> None:
    good = line(span(JOB, 1, 0, "root", 0, 1))
    found = store(good[:40], good, "", "[]", "{}", json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}))
    assert found.broken_lines == 4
    assert len(found.spans) == 1


def test_the_youngest_span_with_an_attribute_is_found() -> None:
    found = store(
        line(
            span(JOB, 1, 0, "start replica", 5, 6, llmgw__replica="m-0"),
            span(PASS, 1, 0, "start replica", 1, 2, llmgw__replica="m-0"),
        )
    )
    latest = found.latest("llmgw.replica", "m-0")
    assert latest is not None
    assert latest.trace_id == JOB
    assert found.latest("llmgw.replica", "m-1") is None


def test_what_the_exporter_writes_is_read(tmp_path: Path) -> None:
    provider = make_provider(TracingConfig(enabled=True, file=tmp_path / "{service}.jsonl"), "toy")
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("root", attributes={"n": 1, "flag": True, "list": ["a", "b"], "x": 1.5}) as root:
        context = set_span_in_context(root)
        child = tracer.start_span(
            "child", context=context, kind=SpanKind.CONSUMER, links=[Link(root.get_span_context())]
        )
        child.add_event("turned down", {"reason": "memory"})
        child.set_status(Status(StatusCode.ERROR, "boom"))
        child.end()
    provider.shutdown()
    found = store(*(tmp_path / "toy.jsonl").read_text().splitlines())
    assert found.broken_lines == 0
    [top] = tree(found, format(root.get_span_context().trace_id, "032x"))
    assert top.span.attributes == {"n": 1, "flag": True, "list": ["a", "b"], "x": 1.5}
    assert top.span.service == "toy"
    [below] = top.children
    assert below.span.error == "boom"
    assert below.span.events[0].attributes == {"reason": "memory"}
    assert below.span.links == (top.span.id,)


def test_the_json_of_a_trace_is_stable() -> None:
    [root] = tree(store(line(span(JOB, 1, 0, "serve model", 1, 2, links=((PASS, 7),), llmgw__model="m"))), JOB)
    assert root.model_dump(mode="json") == {
        "relation": "root",
        "span": {
            "trace_id": JOB,
            "span_id": "0000000000000001",
            "parent_id": "",
            "name": "serve model",
            "service": "llmgw-worker",
            "start_ns": 1_000_000_000,
            "end_ns": 2_000_000_000,
            "attributes": {"llmgw.model": "m"},
            "error": None,
            "events": [],
            "links": [[PASS, "0000000000000007"]],
        },
        "children": [],
        "causes": [[PASS, "0000000000000007"]],
    }


@given(parents=st.lists(st.integers(0, 12), max_size=12), links=st.lists(st.integers(1, 12), max_size=12))
def test_every_span_is_shown_exactly_once(parents: list[int], links: list[int]) -> None:
    spans = [
        span(
            JOB,
            number,
            parent if parent < number else 0,
            f"s{number}",
            number,
            number + 1,
            links=tuple((JOB, target) for at, target in enumerate(links) if at % len(parents) + 1 == number),
        )
        for number, parent in enumerate(parents, start=1)
    ]
    shown: list[str] = []

    def walk(node: TraceNode) -> None:
        shown.append(node.span.span_id)
        for child in node.children:
            walk(child)

    for root in tree(store(line(*spans)), JOB):
        walk(root)
    assert sorted(shown) == sorted(raw["spanId"] for raw in spans)


def test_trace_ids_are_taken_out_of_traceparents() -> None:
    assert trace_id_of(f"00-{JOB}-{'1' * 16}-01") == JOB
    assert [trace_id_of(text) for text in ("", "00-xyz-1-01", JOB, f"00-{JOB}-{'1' * 16}-00")] == [""] * 4
    assert is_trace_id(JOB)
    assert not is_trace_id("m-0")


def test_off_is_the_no_op_provider_and_nothing_for_temporal() -> None:
    install(TracingConfig(), "toy")()
    with trace.get_tracer("test").start_as_current_span("nothing") as span:
        assert not span.is_recording()
        assert not span.get_span_context().is_valid
        carried: dict[str, str] = {}
        inject(carried)
        assert carried == {}
    assert not [plugin for plugin in plugins() if isinstance(plugin, OpenTelemetryPlugin)]

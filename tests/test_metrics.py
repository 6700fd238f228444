"""What is counted, how it looks on the page, and that no trouble with it reaches what serves."""

import logging
import socket
import urllib.request
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from temporalio.common import MetricAttributes
from temporalio.runtime import (
    BUFFERED_METRIC_KIND_COUNTER,
    BUFFERED_METRIC_KIND_GAUGE,
    BUFFERED_METRIC_KIND_HISTOGRAM,
    BufferedMetric,
    BufferedMetricKind,
    MetricBuffer,
)

from activities import fleet_gauges
from fleet.endpoints import server_of
from fleet.metrics import METRICS, Kind, Metric
from gateway.exchange import Answer
from runtime import metrics
from runtime.config import MetricsConfig
from runtime.temporal_numbers import TemporalNumbers, bounded
from tests.fleets import fleet, inventory, spec
from tests.record_tables import DOCS, TABLES, remade

RESOURCE = Resource({"service.name": "test"})


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_in_the_papers_are_those_of_the_code(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == remade(text, TABLES[name]()), "run: python -m tests.record_tables"


def test_names_are_unique_and_units_are_known() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.unit in ("s", "By", "1") or (metric.unit[0], metric.unit[-1]) == ("{", "}"), metric.name
        assert not metric.name.endswith((".total", ".seconds", ".count")), metric.name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_each_number_is_scraped_under_the_name_that_the_dashboard_uses(metric: Metric) -> None:
    registry = CollectorRegistry()
    meter = metrics.make_provider(registry, RESOURCE).get_meter("llmgw")
    labels = dict.fromkeys(metric.labels, "x")
    if metric.kind is Kind.COUNTER:
        meter.create_counter(metric.name, unit=metric.unit).add(1, labels)
    elif metric.kind is Kind.HISTOGRAM:
        meter.create_histogram(metric.name, unit=metric.unit).record(1, labels)
    else:
        meter.create_gauge(metric.name, unit=metric.unit).set(1, labels)
    page = generate_latest(registry).decode()
    for name in metric.scraped:
        assert any(line.startswith((f"{name}{{", f"{name} ")) for line in page.splitlines()), (name, page)
    for label in metric.labels:
        assert f'{label.replace(".", "_")}="x"' in page


@dataclass
class OfCore:
    """A number as Temporal's core hands it over."""

    name: str
    kind: BufferedMetricKind
    description: str | None = None
    unit: str | None = None


@dataclass
class Update:
    metric: BufferedMetric
    value: int | float
    attributes: MetricAttributes


def test_what_temporal_measures_is_on_the_page_too() -> None:
    registry = CollectorRegistry()
    numbers = TemporalNumbers(MetricBuffer(10), metrics.make_provider(registry, RESOURCE).get_meter("temporal"))
    polls = OfCore("temporal_long_request", BUFFERED_METRIC_KIND_COUNTER)
    numbers.carry(
        [
            Update(polls, 2, {"task_queue": "node/n1/4f2a"}),
            Update(polls, 3, {"task_queue": "node/n1/4f2a"}),
            Update(OfCore("temporal_worker_slots", BUFFERED_METRIC_KIND_GAUGE), 7, {}),
            Update(OfCore("llmgw.job.step.duration", BUFFERED_METRIC_KIND_HISTOGRAM, unit="s"), 1.5, {"a": "b"}),
        ]
    )
    page = generate_latest(registry).decode()
    assert 'temporal_long_request_total{task_queue="node/n1/lease"} 5.0' in page
    assert "temporal_worker_slots 7.0" in page
    assert 'llmgw_job_step_duration_seconds_sum{a="b"} 1.5' in page


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("task_queue", "node/n1/4f2a", "node/n1/lease"),
        ("task_queue", "node/n1", "node/n1"),
        ("task_queue", "llmgw", "llmgw"),
        ("workflow_type", "a/b/c", "a/b/c"),
    ],
)
def test_the_queue_of_a_lease_is_no_new_series_for_each_agent_process(key: str, value: str, shown: str) -> None:
    assert bounded(key, value) == shown


def test_the_page_answers_on_its_own_listener() -> None:
    registry = CollectorRegistry()
    metrics.make_provider(registry, RESOURCE).get_meter("llmgw").create_counter("llmgw.starts").add(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    close = metrics.serve(registry, "127.0.0.1", port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert "llmgw_starts_total 1.0" in answer.read().decode()
    finally:
        close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_a_port_that_is_taken_is_said_and_keeps_nobody_from_work(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken, caplog.at_level(logging.ERROR):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        metrics.serve(CollectorRegistry(), "127.0.0.1", port)()
    [line] = caplog.messages
    assert line.startswith(f"cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert "--metrics-port" in line


def test_metrics_are_off_by_default() -> None:
    assert not MetricsConfig().enabled


# -- the fleet's gauges -----------------------------------------------------------------------------------------------


def test_the_fleet_as_numbers() -> None:
    state = fleet({"n1": inventory()}, spec("m", replicas=2))
    labels = {"llmgw.model.id": "m", "llmgw.model": "m"}
    assert list(fleet_gauges.replicas(state)) == [(0, {**labels, "llmgw.state": "serving"})]
    assert list(fleet_gauges.wanted(state)) == [(2, labels)]
    assert list(fleet_gauges.nodes(state)) == [(1, {"llmgw.state": "ready"})]
    assert list(fleet_gauges.brake(state)) == [(0.0, {})]


# -- what passes through the gateway ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "usage", "model"),
    [
        ([b'{"model":"m","usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'], (7, 3), "m"),
        ([b'{"usage":{"input_tokens":7,"output_tokens":3,"details":{"cached":1}}, "model": "m"}'], (7, 3), "m"),
        ([b"data: {}", b'data: {"model":"m","usage":{"prompt_', b'tokens":7,"completion_tokens":3}}\n\n'], (7, 3), "m"),
        ([b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":9}"}],"model":"m"}'], (), "m"),
        ([b'{"usage":{"prompt_tokens":7'], (), ""),
        ([b'{"usage":null}'], (), ""),
        ([b'{"usage":{"prompt_tokens":"7","completion_tokens":-1}}'], (), ""),
        ([b'{"model":"m","x":"' + b"x" * 9000 + b'","usage":{"prompt_tokens":7,"completion_tokens":3}}'], (7, 3), "m"),
        ([b"\xff\xfe"], (), ""),
        ([], (), ""),
    ],
)  # fmt: skip
def test_usage_is_read_off_what_passes(chunks: list[bytes], usage: tuple[int, ...], model: str) -> None:
    answer = Answer()
    for chunk in chunks:
        answer.saw(chunk)
    assert tuple(answer.usage().values()) == usage
    assert answer.model() == model


def test_an_engine_is_named_by_host_and_port() -> None:
    assert server_of("http://10.0.0.7:21000") == {"server.address": "10.0.0.7", "server.port": 21000}
    assert server_of("http://[::1]:21000/x") == {"server.address": "::1", "server.port": 21000}

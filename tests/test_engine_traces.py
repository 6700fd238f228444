"""What an engine is told of tracing, as values; the real vLLM's spans are looked at in test_vllm.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

from agent.engine_traces import engine_traces
from agent.engines import ADAPTERS
from fleet.spec import Engine
from runtime.config import TracingConfig
from tests.test_engines import LAUNCH

SPAN = SpanContext(trace_id=0xAB, span_id=0xCD, is_remote=False, trace_flags=TraceFlags(1))
PARENT = "00-000000000000000000000000000000ab-00000000000000cd-01"


@pytest.mark.parametrize(
    ("protocol", "endpoint", "told"),
    [
        ("grpc", "http://c:4317", "http://c:4317"),
        ("http/protobuf", "http://c:4318", "http://c:4318/v1/traces"),
        ("http/protobuf", "https://c/v1/traces", "https://c/v1/traces"),
        ("grpc", "https://c:4317", ""),
        ("grpc", "", ""),
    ],
)
def test_where_its_spans_go(protocol: str, endpoint: str, told: str) -> None:
    config = TracingConfig.model_validate({"enabled": True, "endpoint": endpoint, "protocol": protocol})
    traces = engine_traces(config, SPAN)
    assert (traces.endpoint if traces else "") == told
    assert engine_traces(config.model_copy(update={"enabled": False}), SPAN) is None


def test_vllm_is_told_by_flag_and_environment_and_a_secret_by_the_latter() -> None:
    config = TracingConfig(enabled=True, endpoint="http://c:4317", headers={"authorization": "Bearer a=b,c"})
    launch = replace(LAUNCH, entry="", args=(), traces=engine_traces(config, SPAN))
    command = ADAPTERS[Engine.VLLM].command(Path("p"), launch)
    assert command[-2:] == ["--otlp-traces-endpoint", "http://c:4317"]
    assert "Bearer" not in f"{command} {launch!r}"
    told = ADAPTERS[Engine.VLLM].environment(launch)
    assert told["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "grpc"
    assert told["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] == "authorization=Bearer%20a%3Db%2Cc"
    assert told["traceparent"] == PARENT


def test_without_tracing_nothing_is_told() -> None:
    launch = replace(LAUNCH, entry="", args=())
    assert "--otlp-traces-endpoint" not in ADAPTERS[Engine.VLLM].command(Path("p"), launch)
    assert "traceparent" not in ADAPTERS[Engine.VLLM].environment(launch)
    traces = engine_traces(TracingConfig(enabled=True, endpoint="http://c:4317"), INVALID_SPAN_CONTEXT)
    assert traces is not None
    assert "traceparent" not in traces.variables()

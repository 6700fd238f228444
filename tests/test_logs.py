"""Log lines: which trace they belong to, as text and as JSON, and that no secret is in them."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from runtime import logs
from runtime.config import LogConfig

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
INSIDE = NonRecordingSpan(SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=False, trace_flags=TraceFlags(1)))

log = logging.getLogger("llmgw.test")


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def written(config: LogConfig, node: str = "n1") -> io.StringIO:
    stream = io.StringIO()
    logs.install(config, node=node, stream=stream)
    return stream


def test_a_line_of_text_names_its_trace_only_where_there_is_one() -> None:
    stream = written(LogConfig())
    log.info("engine %s", "launched")
    with trace.use_span(INSIDE):
        log.warning("engine ended")
    outside, inside = stream.getvalue().splitlines()
    assert outside.endswith(" INFO llmgw.test node=n1 engine launched")
    assert inside.endswith(f" WARNING llmgw.test node=n1 engine ended trace_id={TRACE} span_id={SPAN}")


def test_a_line_of_json() -> None:
    stream = written(LogConfig(format="json"))
    with trace.use_span(INSIDE):
        log.info("engine launched\non %s", "é", extra={"replica": "m-0"})
    [line] = stream.getvalue().splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "INFO",
        "logger": "llmgw.test",
        "message": "engine launched\non é",
        "node": "n1",
        "trace_id": TRACE,
        "span_id": SPAN,
        "fields": {"replica": "m-0"},
    }


def test_an_error_brings_its_stack_and_what_is_not_there_is_left_out() -> None:
    stream = written(LogConfig(format="json"), node="")
    try:
        raise ValueError("no such model")
    except ValueError:
        log.exception("it failed")
    found = json.loads(stream.getvalue())
    assert set(found) == {"time", "level", "logger", "message", "error"}
    assert found["error"].endswith("ValueError: no such model")


def test_levels() -> None:
    stream = written(LogConfig(level="warning"))
    log.info("not this")
    logging.getLogger("httpx").info("nor this")
    log.error("this")
    assert [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()] == ["this"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sent Authorization: Bearer abc.def-1", "sent Authorization: Bearer …"),
        ("GET https://user:pa55@hub/x failed", "GET https://user:…@hub/x failed"),
        ("token hf_AbCdEfGhIjKlMnOp is refused", "token hf_… is refused"),
        ("http://127.0.0.1:21000/health answers", "http://127.0.0.1:21000/health answers"),
        ("job/serve/tiny/1 at 12:30:01", "job/serve/tiny/1 at 12:30:01"),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_what_looks_like_a_secret_is_masked(form: str, text: str, shown: str) -> None:
    stream = written(LogConfig.model_validate({"format": form}))
    log.info("%s", text, extra={"said": text})
    line = stream.getvalue()
    assert (json.loads(line)["message"] if form == "json" else line.rstrip().partition("node=n1 ")[2]) == shown
    assert form == "text" or json.loads(line)["fields"] == {"said": shown}

"""ctl's own part of a trace: a root span for each command that acts, or one beneath the caller's TRACEPARENT."""

import os
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import Status, StatusCode

from cli.console import InterruptedRun, run
from cli.errors import sentence
from cli.home import find_home
from runtime import logs, tracing
from runtime.config import LogConfig, TracingConfig

T = TypeVar("T")

TRACER = trace.get_tracer("llmgw.cli")
SERVICE = "llmgw-ctl"
FLUSH_S = 0.5
"""A collector that is away must not hold the operator's prompt back."""
CARRIED = {"traceparent": "TRACEPARENT", "tracestate": "TRACESTATE"}
"""W3C headers, and the environment variables that carry them between commands."""


START = "start ctl"
"""Span from Enter until the command begins: Python, its modules, and at the first use of a clone its environment."""


class Part(NamedTuple):
    """What a command did before it could be recorded; nanoseconds since the epoch."""

    name: str
    since_ns: int
    until_ns: int


def run_traced(command: str, main: Coroutine[Any, Any, T]) -> T:
    """`run`, under a span `ctl <command>`: what the command starts hangs beneath it."""
    with recorded(command):
        return run(main)


@contextmanager
def part(name: str) -> Iterator[None]:
    """A span of what the block does, where the command has one.

    It stands beneath the command's and is no parent: what is sent meanwhile hangs on the command.
    """
    began_ns = time.time_ns()
    try:
        yield
    finally:
        _span_of(Part(name, began_ns, time.time_ns()))


@contextmanager
def recorded(command: str, before: Sequence[Part] = ()) -> Iterator[None]:
    """The span of one command, from Enter on. Connect to Temporal inside it, so that jobs and updates carry it.

    `before` is what it has done already, in order.

    The settings are those of the home's server.yaml. Where there is none, as on a machine that only runs ctl, no span
    is made, and a TRACEPARENT is passed on as it came.
    """
    home = find_home()
    configured = home.server_yaml.exists()
    config = home.server().tracing if configured else TracingConfig()
    # What libraries complain of, on stderr beside the answer.
    logs.install(LogConfig(format=home.server().logging.format if configured else "text", level="warning"))
    given = {name: os.environ[variable] for name, variable in CARRIED.items() if os.environ.get(variable)}
    if not config.enabled and (configured or not given):
        yield
        return
    flush = tracing.install(config.model_copy(update={"enabled": True}), SERVICE)
    parent = extract(given)
    try:
        if config.enabled:
            began_ns = time.time_ns()
            started_ns = _process_started_ns()
            with TRACER.start_as_current_span(
                f"ctl {command}",
                context=parent,
                start_time=started_ns,
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                for one in (Part(START, started_ns, before[0].since_ns if before else began_ns), *before):
                    _span_of(one)
                try:
                    yield
                except BaseException as error:
                    interrupted = isinstance(error, (InterruptedRun, KeyboardInterrupt))
                    span.set_status(Status(StatusCode.ERROR, "interrupted" if interrupted else sentence(error)))
                    raise
        else:
            token = otel_context.attach(parent)
            try:
                yield
            finally:
                otel_context.detach(token)
    finally:
        tracing.bounded(flush, FLUSH_S)


def _span_of(done: Part) -> None:
    """Only within a span that is recorded here: beneath a caller's, which is passed on, it would be one of nobody's."""
    if trace.get_current_span().is_recording():
        TRACER.start_span(done.name, start_time=done.since_ns).end(end_time=done.until_ns)


def _process_started_ns() -> int:
    """When this process, or the shell that became it, was started; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        age_s = 0.0
    return time.time_ns() - int(age_s * 1e9)

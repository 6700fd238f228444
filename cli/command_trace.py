"""ctl's own part of a trace: a root span for each command that acts, or one beneath the caller's TRACEPARENT."""

import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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


def run_traced(command: str, main: Coroutine[Any, Any, T]) -> T:
    """`run`, under a span `ctl <command>`: what the command starts hangs beneath it."""
    with recorded(command):
        return run(main)


@contextmanager
def recorded(command: str) -> Iterator[None]:
    """The span of one command. Connect to Temporal inside it, so that jobs and updates carry it.

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
            with TRACER.start_as_current_span(
                f"ctl {command}", context=parent, record_exception=False, set_status_on_exception=False
            ) as span:
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

"""OpenTelemetry for every process: the provider, its exporters, and what keeps workflow spans true.

Nothing else imports the OpenTelemetry SDK or an exporter.
"""

import os
import platform
import socket
import threading
from collections.abc import Callable
from typing import TextIO, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.json.file import FileSpanExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from temporalio import workflow
from temporalio.contrib.opentelemetry import ReplaySafeTracerProvider, create_tracer_provider

from runtime import VERSION
from runtime.config import TracingConfig
from runtime.span_file import RotatingLines

EXPORT_DELAY_MS = 200
"""A killed process loses what was not exported: the default of five seconds is too much of a start's trace."""


def install(config: TracingConfig, service: str, *, instance: str = "") -> Callable[[], None]:
    """Make this process's spans go where `config` says; off leaves the no-op provider in place.

    `service` is `service.name` where the config names none; `instance` is `service.instance.id`, such as the node.
    Returns what to call before the process ends: it exports what is left. `bounded` says how long that may take.
    """
    if not config.enabled:
        return lambda: None
    provider = make_provider(config, service, instance=instance)
    trace.set_tracer_provider(provider)

    def shut_down() -> None:
        provider.force_flush(5_000)
        provider.shutdown()

    return shut_down


def bounded(flush: Callable[[], None], seconds: float) -> None:
    """Call what `install` returned, and wait no longer than this: a collector that is away must not hold an end up."""
    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(seconds)


def make_provider(config: TracingConfig, service: str, *, instance: str = "") -> ReplaySafeTracerProvider:
    """A provider whose spans survive replay, with the exporters of `config`."""
    provider = create_tracer_provider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=resource_of(config.service_name or service, instance=instance),
        shutdown_on_exit=False,  # `shut_down` bounds the wait; an exit handler would not
    )
    for exporter in _exporters(config, config.service_name or service):
        provider.add_span_processor(
            WorkflowSpanGuard(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_MS))
        )
    return provider


def resource_of(service: str, *, instance: str = "") -> Resource:
    """Who this process is, for spans and metrics; `instance` is `service.instance.id`, such as the node."""
    return Resource.create(
        {
            "service.name": service,
            "service.namespace": "llmgw",
            "service.version": VERSION,
            "service.instance.id": instance or f"{socket.gethostname()}/{os.getpid()}",
            "host.name": socket.gethostname(),
            "host.arch": platform.machine(),
            "process.pid": os.getpid(),
        }
    )


def _exporters(config: TracingConfig, service: str) -> list[SpanExporter]:
    exporters: list[SpanExporter] = []
    if config.file is not None:
        file = config.file.with_name(config.file.name.replace("{service}", service))
        exporters.append(FileSpanExporter(stream=cast("TextIO", RotatingLines(file, int(config.file_max)))))
    if config.endpoint and config.protocol == "grpc":
        insecure = not config.endpoint.startswith("https://")
        exporters.append(GrpcSpanExporter(endpoint=config.endpoint, insecure=insecure, headers=config.headers))
    elif config.endpoint:
        exporters.append(HttpSpanExporter(endpoint=http_traces_url(config.endpoint), headers=config.headers))
    return exporters


def http_traces_url(endpoint: str) -> str:
    """Where spans go to by HTTP: OTLP's path behind the endpoint, if it is not there yet."""
    return endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"


class WorkflowSpanGuard(SpanProcessor):
    """Drops spans that were born in a workflow and end outside one.

    When a worker evicts a workflow or stops in a process that lives on, the SDK unwinds the workflow's coroutines,
    and each open span would be exported early and cut short. The span is not lost: the workflow opens it again, with
    the same ids and start, when it is next replayed.
    """

    def __init__(self, inner: SpanProcessor) -> None:
        self._inner = inner

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if workflow.in_workflow():
            span.__dict__["_llmgw_in_workflow"] = True
        self._inner.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        if not span.__dict__.get("_llmgw_in_workflow", False) or workflow.in_workflow():
            self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

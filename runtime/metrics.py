"""Metrics of a process: the provider behind `runtime/instruments.py`, and the page that Prometheus scrapes.

The page has a listener of its own, in a thread of its own: whoever reaches the gateway's port need not reach it, and a
busy event loop does not delay it. Nothing else imports the SDK's metrics or the Prometheus client.
"""

import logging
import os
from collections.abc import Callable

import prometheus_client
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from temporalio.runtime import LoggingConfig, MetricBuffer, MetricBufferDurationFormat, Runtime, TelemetryConfig

from runtime.config import MetricsConfig
from runtime.temporal_numbers import ROOM, TemporalNumbers

log = logging.getLogger("llmgw.metrics")

INTERNAL = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"


def install(
    config: MetricsConfig, resource: Resource, *, port: int | None = None, core_log: str = ""
) -> Callable[[], None]:
    """Serve this process's metrics where `config` says, and make Temporal's runtime; returns what ends it.

    `port` is used instead of the configured one; `core_log` is the level of what Temporal's core logs, where it is not
    the default. Off, nothing is counted. A port that is taken keeps no process from its work: it is said in the log.
    """
    buffer = MetricBuffer(ROOM, MetricBufferDurationFormat.SECONDS) if config.enabled else None
    logging_config = LoggingConfig(filter=core_log) if core_log else LoggingConfig.default
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=logging_config, metrics=buffer)))
    if buffer is None:
        return lambda: None
    # The SDK's own numbers, such as spans that a full queue dropped; it reads the switch when a tracer is made.
    os.environ.setdefault(INTERNAL, "true")
    registry = CollectorRegistry()
    provider = make_provider(registry, resource)
    metrics.set_meter_provider(provider)
    numbers = TemporalNumbers(buffer, provider.get_meter("temporal"))
    numbers.start()
    close_page = serve(registry, config.host, config.port if port is None else port)

    def shut_down() -> None:
        close_page()
        numbers.close()
        provider.shutdown()

    return shut_down


def make_provider(registry: CollectorRegistry, resource: Resource) -> MeterProvider:
    """A provider whose numbers are read through `registry`."""
    reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    return MeterProvider([reader], resource, shutdown_on_exit=False)


def serve(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Listen, and answer every scrape; returns what ends it."""
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        log.error(
            "cannot listen on %s:%d (%s): this process shows no metrics; stop what holds the port, or choose another "
            "with --metrics-port",
            host,
            port,
            error.strerror or error,
        )
        return lambda: None
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return close

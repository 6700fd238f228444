"""What an engine is told of tracing: where its own spans go, and which span they belong beneath."""

from urllib.parse import quote

from opentelemetry.trace import SpanContext

from agent.engines.adapter import Traces
from runtime.config import TracingConfig
from runtime.tracing import http_traces_url


def engine_traces(config: TracingConfig, parent: SpanContext) -> Traces | None:
    """As agent.yaml says; None where spans do not go to an OTLP endpoint, or to one an engine could not reach.

    Engines speak gRPC in clear text only, so an endpoint with TLS and gRPC gets no spans of theirs.
    """
    if not (config.enabled and config.endpoint):
        return None
    if config.protocol == "grpc" and config.endpoint.startswith("https://"):
        return None
    within = f"00-{parent.trace_id:032x}-{parent.span_id:016x}-{int(parent.trace_flags):02x}"
    return Traces(
        endpoint=config.endpoint if config.protocol == "grpc" else http_traces_url(config.endpoint),
        protocol=config.protocol,
        headers=",".join(f"{quote(name)}={quote(value)}" for name, value in config.headers.items()),
        parent=within if parent.is_valid else "",
    )

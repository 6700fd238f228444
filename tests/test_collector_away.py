"""A collector that takes connections and never answers: nobody waits for it, and what is lost is counted."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SPANS = 8_000
"""Four times what the queue holds."""

PROCESS = f"""
import json, os, sys, time, urllib.request
from opentelemetry import trace
from prometheus_client.parser import text_string_to_metric_families
from runtime import metrics, tracing
from runtime.config import MetricsConfig, TracingConfig

collector, page = sys.argv[1], int(sys.argv[2])
metrics.install(MetricsConfig(enabled=True, port=page), tracing.resource_of("test"))
flush = tracing.install(TracingConfig(enabled=True, endpoint=collector, protocol="http/protobuf"), "test")
tracer = trace.get_tracer("test")
began = time.monotonic()
for _ in range({SPANS}):
    tracer.start_span("work").end()
took = time.monotonic() - began
with urllib.request.urlopen(f"http://127.0.0.1:{{page}}/metrics") as answer:
    families = list(text_string_to_metric_families(answer.read().decode()))
dropped = sum(
    sample.value
    for family in families
    for sample in family.samples
    if sample.name == "otel_sdk_processor_span_processed_total" and sample.labels.get("error_type") == "queue_full"
)
began = time.monotonic()
tracing.bounded(flush, 0.5)
print(json.dumps({{"took": took, "dropped": dropped, "end": time.monotonic() - began}}), flush=True)
os._exit(0)
"""


def test_nothing_waits_for_it_and_what_is_lost_is_counted() -> None:
    with socket.socket() as collector, socket.socket() as page:
        collector.bind(("127.0.0.1", 0))
        collector.listen(100)
        page.bind(("127.0.0.1", 0))
        port = page.getsockname()[1]
        page.close()
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, f"http://127.0.0.1:{collector.getsockname()[1]}", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    said = json.loads(done.stdout)
    # One export alone waits ten seconds for its answer, and these would be sixteen.
    assert said["took"] < 60
    assert SPANS - 2048 - 512 <= said["dropped"] <= SPANS
    assert said["end"] < 10
    assert done.stderr.count("Queue full, dropping Span.") <= 3, "said now and then, not for each"

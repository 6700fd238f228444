"""What Temporal's SDK measures in this process, and what workflows measure through it, as OpenTelemetry's instruments.

The SDK's core counts in a buffer of its own, without Python. It is emptied regularly: a full one drops what comes.
Workflows use it too (`workflow.metric_meter()`), because it counts nothing again while a workflow is replayed.
"""

import threading
from collections.abc import Sequence

from opentelemetry.metrics import Counter, Histogram, Meter
from opentelemetry.metrics import _Gauge as Gauge
from temporalio.runtime import (
    BUFFERED_METRIC_KIND_COUNTER,
    BUFFERED_METRIC_KIND_GAUGE,
    BufferedMetric,
    BufferedMetricUpdate,
    MetricBuffer,
)

from fleet.metrics import SECONDS

ROOM = 50_000
"""Updates. A busy worker makes some thousand a second."""
EVERY_S = 1.0


class TemporalNumbers:
    """Carries the buffer over into a meter."""

    def __init__(self, buffer: MetricBuffer, meter: Meter) -> None:
        self._buffer = buffer
        self._meter = meter
        self._made: dict[str, Counter | Histogram | Gauge] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="temporal-numbers", daemon=True)

    def start(self) -> None:
        """Carry over once a second, until closed. Call it once the Runtime of the buffer is made."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._ended.set()
        self._thread.join(EVERY_S)

    def carry(self, updates: Sequence[BufferedMetricUpdate]) -> None:
        """Carry these over."""
        for update in updates:
            labels = {key: bounded(key, value) for key, value in update.attributes.items()}
            made = self._made.get(update.metric.name) or self._make(update.metric)
            if isinstance(made, Counter):
                made.add(update.value, labels)
            elif isinstance(made, Histogram):
                made.record(update.value, labels)
            else:
                made.set(update.value, labels)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.carry(self._buffer.retrieve_updates())

    def _make(self, metric: BufferedMetric) -> Counter | Histogram | Gauge:
        name, unit, meaning = metric.name, metric.unit or "", metric.description or ""
        made: Counter | Histogram | Gauge
        if metric.kind == BUFFERED_METRIC_KIND_COUNTER:
            made = self._meter.create_counter(name, unit=unit, description=meaning)
        elif metric.kind == BUFFERED_METRIC_KIND_GAUGE:
            made = self._meter.create_gauge(name, unit=unit, description=meaning)
        else:
            made = self._meter.create_histogram(
                name, unit=unit, description=meaning, explicit_bucket_boundaries_advisory=list(SECONDS)
            )
        self._made[name] = made
        return made


def bounded(key: str, value: str | int | float | bool) -> str | int | float | bool:
    """A label's value without what is new in each process: the queue of an agent's lease names its incarnation."""
    if key == "task_queue" and isinstance(value, str) and value.count("/") == 2:
        return value.rpartition("/")[0] + "/lease"
    return value

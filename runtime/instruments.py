"""The instruments behind the numbers of `fleet/metrics.py`, through OpenTelemetry's API: no-ops until a page is served.

An instrument holds nothing itself: whatever provider the composition root installs counts.
"""

from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation

from fleet.metrics import SECONDS, TOKENS, Metric

METER = metrics.get_meter("llmgw")

Labels = Mapping[str, str | int]


def counter(metric: Metric) -> Counter:
    """For what is added up."""
    return METER.create_counter(metric.name, unit=metric.unit, description=metric.meaning)


def histogram(metric: Metric) -> Histogram:
    """For times, and for tokens."""
    bounds = SECONDS if metric.unit == "s" else TOKENS
    return METER.create_histogram(
        metric.name, unit=metric.unit, description=metric.meaning, explicit_bucket_boundaries_advisory=list(bounds)
    )


def gauge(metric: Metric, read: Callable[[], Iterable[tuple[float, Labels]]]) -> None:
    """For what is looked at when somebody asks; what `read` leaves out is not shown any more."""

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, dict(labels)) for value, labels in read()]

    METER.create_observable_gauge(metric.name, callbacks=[observe], unit=metric.unit, description=metric.meaning)

"""Numbers that workflows measure: Temporal's own meter, which counts nothing again while a workflow is replayed."""

from collections.abc import Mapping

from temporalio import workflow

from fleet.metrics import Metric


def measure(metric: Metric, seconds: float, labels: Mapping[str, str]) -> None:
    """One more value of a histogram."""
    made = workflow.metric_meter().create_histogram_float(metric.name, metric.meaning, metric.unit)
    made.record(seconds, dict(labels))


def count(metric: Metric, labels: Mapping[str, str]) -> None:
    """One more of a counter."""
    workflow.metric_meter().create_counter(metric.name, metric.meaning, metric.unit).add(1, dict(labels))

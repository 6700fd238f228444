"""Spans as OTLP JSON lines, for tests of what reads them."""

import json
from typing import Any

from cli.spans import SpanStore

SECOND = 1_000_000_000


def span(
    trace: str,
    number: int,
    parent: int,
    name: str,
    start: float,
    end: float,
    *,
    links: tuple[tuple[str, int], ...] = (),
    error: str | None = None,
    events: tuple[dict[str, Any], ...] = (),
    **attributes: str,
) -> dict[str, Any]:
    """One span; times are seconds, `__` in an attribute's name stands for a dot."""
    raw: dict[str, Any] = {
        "traceId": trace,
        "spanId": f"{number:016x}",
        "name": name,
        "startTimeUnixNano": str(int(start * SECOND)),
        "endTimeUnixNano": str(int(end * SECOND)),
        "attributes": [
            {"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()
        ],
        "events": list(events),
        "links": [{"traceId": linked, "spanId": f"{target:016x}"} for linked, target in links],
        "status": {} if error is None else {"code": 2, "message": error},
    }
    return raw if not parent else {**raw, "parentSpanId": f"{parent:016x}"}


def line(*spans: dict[str, Any], service: str = "llmgw-worker") -> str:
    """One export."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]})


def store(*lines: str) -> SpanStore:
    """What a reader of these lines knows."""
    made = SpanStore()
    made.read(lines)
    return made

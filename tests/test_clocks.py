"""No decision compares the clocks of two machines: each counts its own seconds, or takes the time of the fleet."""

import ast
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from activities import node_contract

ROOT = Path(__file__).parent.parent
PACKAGES = ("agent", "activities", "gateway", "runtime", "workflows", "fleet")

WALL_CLOCK = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}

ALLOWED = {
    "gateway/app.py": "the start of a span, which Temporal and the planner never see",
    "activities/smoke.py": "the start of a span",
    "activities/streamed.py": "the moment of a span's event",
    "agent/attempts.py": "the start of a span",
    "agent/peer_waits.py": "the start of a span",
    "agent/start.py": "the start of a span",
    "runtime/interceptors.py": "the ends of spans, told to the workflow that waits",
    "activities/registry.py": "the day on which a resolution was kept, for people to read",
}
"""Who reads this machine's time of day, and what for. Workflows ask Temporal, whose events carry its own clock."""


def readers() -> set[str]:
    """Modules that ask this machine for the time of day."""
    return {
        str(path.relative_to(ROOT))
        for path in [ROOT / "worker.py", *(found for name in PACKAGES for found in (ROOT / name).rglob("*.py"))]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCK
    }


def test_nobody_who_takes_part_in_a_decision_reads_a_clock_of_its_own() -> None:
    assert readers() == set(ALLOWED)


def models() -> list[type[BaseModel]]:
    """All that a node and its workflow say to each other."""
    return [
        found
        for found in vars(node_contract).values()
        if isinstance(found, type) and issubclass(found, BaseModel) and found.__module__ == node_contract.__name__
    ]


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_what_a_node_says_carries_spans_of_time_and_no_time_of_day(model: type[BaseModel]) -> None:
    numbers = [
        name
        for name, field in model.model_fields.items()
        if field.annotation is float or float in get_args(field.annotation)
    ]
    assert [name for name in numbers if not name.endswith(("_s", "seconds"))] == []
    # `_ns` is for the ends of spans alone.
    assert not [name for name in model.model_fields if name.endswith(("_at", "_time", "since", "until"))]

"""Remakes the tables of the papers that are made from the code: `python -m tests.record_tables`."""

from collections.abc import Iterable
from pathlib import Path

from fleet.attributes import ATTRIBUTES
from fleet.metrics import METRICS

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- made by: python -m tests.record_tables -->\n", "<!-- end -->"


def metrics_table() -> str:
    """Every number llmgw measures."""
    rows = [
        (
            f"`{metric.name}`",
            metric.kind.value,
            metric.unit,
            metric.process,
            ", ".join(f"`{label}`" for label in metric.labels) or "–",
            metric.meaning,
        )
        for metric in METRICS
    ]
    return table(("name", "kind", "unit", "of", "labels", "meaning"), rows)


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """As Markdown."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def attributes_table() -> str:
    """Every attribute of a span."""
    return table(("attribute", "meaning"), ((f"`{name}`", meaning) for name, meaning in ATTRIBUTES.items()))


TABLES = {"metrics.md": metrics_table, "tracing.md": attributes_table}


def remade(text: str, made: str) -> str:
    """A paper with its table in place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    for name, make in TABLES.items():
        paper = DOCS / name
        paper.write_text(remade(paper.read_text(encoding="utf-8"), make()), encoding="utf-8")

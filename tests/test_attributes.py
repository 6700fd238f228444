"""The table of attributes against the code: whatever a span is given stands in it, and nothing else."""

import ast
import re
from collections.abc import Iterator

import pytest

from fleet.attributes import ATTRIBUTES
from fleet.metrics import METRICS
from tests.test_boundaries import sources

NAMED = re.compile(r"(llmgw|gen_ai|http|server|error|url|process|host|service)(\.[a-z_]+)+\.?")

OTHERS = {"server.yaml", "http.request", "http.disconnect", "http.response.start", "http.response.body"}
"""Texts of that shape that name something else: a file, and messages of ASGI."""

OF_METRICS_ALONE = {label for metric in METRICS for label in metric.labels} - ATTRIBUTES.keys()


def texts() -> Iterator[tuple[str, str]]:
    """Each text of the code that looks like an attribute, and its file; where a part varies it ends in a dot."""
    for path in sources():
        if path.name in ("attributes.py", "metrics.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = {id(argument) for call in calls if _names_a_source(call) for argument in call.args}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in named else None
            if isinstance(text, str) and NAMED.fullmatch(text) and text not in OTHERS:
                yield text, path.name


def _names_a_source(call: ast.Call) -> bool:
    """Whether it is a call that names a logger, a tracer or a meter."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("getLogger", "get_tracer", "get_meter")


def known(text: str) -> str:
    """The name in the table that a text stands for."""
    return next(
        (name for name in ATTRIBUTES if name == text or (text.endswith(".") and name.startswith(f"{text}<"))), ""
    )


def test_whatever_the_code_sets_stands_in_the_table() -> None:
    assert [found for found in texts() if not known(found[0]) and found[0] not in OF_METRICS_ALONE] == []


def test_whatever_stands_in_the_table_is_set() -> None:
    assert ATTRIBUTES.keys() - {known(text) for text, _ in texts()} == set()


@pytest.mark.parametrize(("name", "meaning"), ATTRIBUTES.items())
def test_each_has_a_meaning_that_fits_a_table(name: str, meaning: str) -> None:
    assert meaning
    assert "|" not in name + meaning

"""Plans of named situations against the texts in tests/goldens/plans/: `python -m tests.record_plans` remakes those."""

import pytest

from tests.record_plans import PLANS
from tests.situations.text import golden, situations

SITUATIONS = situations()


def test_each_situation_has_its_text_and_each_text_its_situation() -> None:
    assert sorted(SITUATIONS) == sorted(path.stem for path in PLANS.glob("*.txt"))


@pytest.mark.parametrize("name", sorted(SITUATIONS))
def test_the_plan_reads_as_it_did(name: str) -> None:
    assert golden(name, SITUATIONS[name]) == (PLANS / f"{name}.txt").read_text(encoding="utf-8")

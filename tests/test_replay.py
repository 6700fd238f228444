"""Histories of earlier versions replay: a worker that is upgraded goes on with the workflows that run."""

from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer

from runtime.temporal import llmgw_plugin
from workflows import WORKFLOWS

STORED = sorted((Path(__file__).parent / "histories").rglob("*.json"))
"""Those in `0.1.0-gangs` are of a gang from before its port was looked at on every node: one start met a taken one."""


def test_every_kind_of_workflow_has_a_stored_history() -> None:
    assert {path.name.partition("-")[0] for path in STORED} == {"Fleet", "ModelJob", "Node", "Reconcile", "Replica"}


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
async def test_a_stored_history_replays(path: Path) -> None:
    history = WorkflowHistory.from_json(path.stem, path.read_text(encoding="utf-8"))
    await Replayer(workflows=WORKFLOWS, plugins=[llmgw_plugin()]).replay_workflow(history)

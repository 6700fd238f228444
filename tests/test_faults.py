"""kill -9 at every point: the worker during each step, the agent while starting and serving, the engine."""

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import WorkflowHandle

from activities import contract
from activities.contract import JobState
from fleet.state import ReplicaState
from tests.system import System, system
from tests.test_end_to_end import chat
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[System]:
    async with system(tmp_path) as made:
        made.start_worker()
        made.start_agent("n1")
        await made.ready("n1")
        yield made


def scheduled(name: str) -> Callable[[HistoryEvent], bool]:
    """The event that begins a step whose work is an activity."""
    return lambda event: event.activity_task_scheduled_event_attributes.activity_type.name == name


def told(signal_name: str) -> Callable[[HistoryEvent], bool]:
    """The event with which a signal of Fleet arrives."""
    return lambda event: event.workflow_execution_signaled_event_attributes.signal_name == signal_name


def asked(event: HistoryEvent) -> bool:
    """The job's request to Fleet is on its way."""
    return event.event_type == EventType.EVENT_TYPE_SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED


MOMENTS = {
    "registry": scheduled(contract.RESOLVE_MODEL),
    "mirror": scheduled(contract.MIRROR_MODEL),
    "check": scheduled(contract.CHECK_FIT),
    "catalog": asked,
    "placement": told("answer"),
    "smoke test": scheduled(contract.SMOKE_TEST),
}


async def happened(job: WorkflowHandle[Any, Any], moment: Callable[[HistoryEvent], bool]) -> None:
    """Return as soon as the job's history holds the event: the server is asked to wait for it."""
    async for event in job.fetch_history_events(wait_new_event=True):
        if moment(event):
            return
    raise AssertionError("the job ended first")


@pytest.mark.parametrize("step", MOMENTS)
async def test_the_worker_killed_during_a_step_changes_nothing(running: System, step: str) -> None:
    job = await running.serve()
    await happened(job, MOMENTS[step])
    running.kill("worker")
    running.start_worker()
    result = await job.result()
    assert result.sentence == "tiny is serving: 1 replica on n1"
    status = await running.status(job)
    assert status.state is JobState.DONE
    assert [row.state for row in status.steps] == ["done"] * 6
    state = await running.state()
    assert [(replica.id, replica.state) for replica in state.replicas.values()] == [("tiny-0", ReplicaState.SERVING)]
    assert await chat(state.replicas["tiny-0"].endpoint)
    assert len(launches(running)) == 1


def launches(running: System) -> list[Path]:
    """Logs of engine starts on n1: one file each."""
    return sorted((running.home / "n1" / "logs").rglob("*.log"))


async def test_the_agent_killed_while_serving_changes_nothing(running: System) -> None:
    await (await running.serve()).result()
    before = await running.serving()
    engine = engine_pid(running)
    running.kill("n1")
    assert await chat(before.endpoint)
    first = (await running.state()).nodes["n1"].incarnation

    async def rejoined() -> bool:
        return (await running.state()).nodes["n1"].incarnation != first

    running.start_agent("n1")
    await until(rejoined, 30.0)
    after = await running.serving()
    idle = {"load": 0.0, "loaded_at": 0.0, "in_flight": 0}  # the agent that is back tells how busy it is
    assert after.model_copy(update=idle) == before.model_copy(update=idle)
    assert engine_pid(running) == engine
    assert await chat(after.endpoint)


def engine_pid(running: System) -> int:
    """The pid of the one engine on n1, from the agent's ledger."""
    ledger = json.loads((running.home / "n1" / "ledger.json").read_text())
    pids = [int(value) for key, value in _walk(ledger) if key == "pid" and psutil.pid_exists(int(value))]
    assert pids
    return pids[0]


def _walk(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [(key, value) for key, value in tree.items()] + [
            found for value in tree.values() for found in _walk(value)
        ]
    if isinstance(tree, list):
        return [found for value in tree for found in _walk(value)]
    return []


def spans_of(running: System, process: str) -> str:
    path = running.home / "traces" / f"{process}.jsonl"
    return path.read_text() if path.exists() else ""


async def test_the_agent_killed_while_starting_goes_on_with_the_same_engine(running: System) -> None:
    job = await running.serve()
    await until(lambda: bool(launches(running)), 30.0)
    running.kill("n1")
    running.start_agent("n1")
    assert (await job.result()).sentence == "tiny is serving: 1 replica on n1"
    replica = await running.serving()
    assert await chat(replica.endpoint)
    assert len(launches(running)) == 1
    assert replica.failures == ()


async def test_an_engine_that_is_killed_is_restarted_and_recorded(running: System) -> None:
    await (await running.serve()).result()
    before = await running.serving()
    os.kill(engine_pid(running), signal.SIGKILL)
    after = await running.serving(after=before.generation)
    assert len(after.failures) == 1
    assert await chat(after.endpoint)
    assert after.failure is not None
    assert "killed by signal 9" in after.failure.detail
    await until(lambda: "killed by signal 9" in spans_of(running, "worker"))  # exporters write with a delay


async def test_worker_and_agent_killed_together_while_starting(running: System) -> None:
    job = await running.serve()
    await until(lambda: bool(launches(running)), 30.0)
    running.kill("worker")
    running.kill("n1")
    running.start_worker()
    running.start_agent("n1")
    assert (await job.result()).sentence == "tiny is serving: 1 replica on n1"
    assert len(launches(running)) == 1

"""The main job with real processes and the real engine: serve, answer, remove; and what is wrong is said."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError

from activities.contract import CONTROL_QUEUE, MODEL_CHECK_WORKFLOW, CheckReport, JobState
from fleet.reasons import Reason
from tests.conftest import temporal_binary
from tests.fleets import GIB
from tests.system import ONE_THREAD, System, system
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """One worker and one node, shared by the tests of this module."""
    async with system(tmp_path_factory.mktemp("system")) as made:
        made.start_worker()
        made.start_agent("n1")
        await made.ready("n1")
        yield made


async def failure_of(job: WorkflowHandle[Any, Any]) -> ApplicationError:
    with pytest.raises(WorkflowFailureError) as caught:
        await job.result()
    assert isinstance(caught.value.cause, ApplicationError), caught.value.cause
    return caught.value.cause


async def chat(endpoint: str, model: str = "tiny") -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        answer = await http.post(f"{endpoint}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_serve_chat_and_remove(running: System) -> None:
    job = await running.serve(replicas=2)
    result = await job.result()
    assert result.sentence == "tiny is serving: 2 replicas on n1"
    assert result.smoke_test is not None
    assert result.smoke_test.answer
    state = await running.state()
    endpoints = {replica.endpoint for replica in state.replicas.values()}
    assert len(endpoints) == 2
    for endpoint in endpoints:
        assert await chat(endpoint)
    engines = running.engines()
    assert engines

    again = await running.serve(replicas=2)
    assert (await again.result()).replicas == result.replicas
    assert (await running.status(again)).steps[1].detail.startswith("already mirrored")

    reserved = state.models["tiny"].spec.need.memory
    await (await running.job({"kind": "remove", "name": "tiny"})).result()
    assert [process for process in engines if process.is_running()] == []
    after = await running.state()
    assert after.replicas == {}

    (measured,) = after.peaks
    assert 0.8 * reserved < measured.peak <= reserved, "one run of both replicas, within the estimate"
    wish = {
        "repo": f"file:{running.model}",
        "name": "tiny",
        "context_length": 512,
        "concurrency": 2,
        "args": ONE_THREAD,
    }
    report: CheckReport = await running.client.execute_workflow(
        MODEL_CHECK_WORKFLOW, wish, id="check/tiny", task_queue=CONTROL_QUEUE, result_type=CheckReport
    )
    assert (report.check.measured, report.check.candidate) == (measured.peak, "n1")
    assert report.check.need.memory < reserved
    assert report.preflight is not None
    assert report.preflight.engine_installed


async def test_the_temporal_cli_is_a_door(running: System) -> None:
    def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(temporal_binary()), *arguments, "--address", running.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    start = ("workflow", "execute", "--type", "ModelJob", "--task-queue", "llmgw", "--output", "json")
    good = json.dumps({"repo": f"file:{running.model}", "name": "door", "context_length": 256})
    served = cli(*start, "--workflow-id", "door-1", "--input", good)
    assert served.returncode == 0, served.stderr
    assert "door is serving: 1 replica on n1" in served.stdout

    bad = json.dumps({"repo": f"file:{running.model}", "replcas": 2})
    refused = cli(*start, "--workflow-id", "door-2", "--input", bad)
    assert refused.returncode == 1
    assert "replcas: Extra inputs are not permitted" in refused.stdout + refused.stderr

    listed = cli("workflow", "list", "--query", "LlmgwModel = 'door' AND WorkflowType = 'Replica'", "--output", "json")
    assert [row["execution"]["workflowId"] for row in json.loads(listed.stdout)] == ["replica/door-0"]
    details = cli("workflow", "metadata", "--workflow-id", "door-1")
    assert "| placement | done |" in details.stdout

    removed = cli(*start, "--workflow-id", "door-3", "--input", '{"kind": "remove", "name": "door"}')
    assert removed.returncode == 0, removed.stderr


async def test_every_activity_has_a_summary(running: System) -> None:
    job = await running.serve(name="summed")
    await job.result()
    for workflow in (job.id, "replica/summed-0"):
        history = await running.client.get_workflow_handle(workflow).fetch_history()
        scheduled = [event for event in history.events if event.HasField("activity_task_scheduled_event_attributes")]
        assert scheduled
        assert all(event.user_metadata.summary.data for event in scheduled)
    await (await running.job({"kind": "remove", "name": "summed"})).result()


def clean(running: System, before: set[Path]) -> None:
    """Nothing was left: no engine, no reservation is checked by the caller, no partial or new file."""
    assert running.engines() == []
    after = files(running)
    assert after - before == set()


def files(running: System) -> set[Path]:
    places = (running.home / "mirror", running.home / "n1" / "weights")
    return {path for place in places for path in place.rglob("*") if path.suffix != ".lock"}


async def test_a_truncated_gguf_is_a_sentence_and_leaves_nothing(running: System) -> None:
    broken = running.home / "broken.gguf"
    broken.write_bytes(running.model.read_bytes()[:1_000_000])
    job = await running.serve(repo=f"file:{broken}", name="broken")
    failure = await failure_of(job)
    assert failure.type == Reason.WEIGHTS_UNREADABLE
    assert "broken.gguf" in failure.message
    status = await running.status(job)
    assert status.state is JobState.FAILED
    assert status.failure is not None
    assert status.steps[2].name == "check"
    assert status.steps[2].state == "failed"
    assert "broken.gguf" in status.steps[2].detail
    assert "broken" not in (await running.state()).models
    assert running.engines() == []


async def test_a_repo_that_does_not_exist_is_a_sentence(running: System) -> None:
    before = files(running)
    job = await running.serve(repo="file:/no/such/model.gguf", name="nowhere")
    failure = await failure_of(job)
    assert failure.type == Reason.REPO_NOT_FOUND
    assert "/no/such/model.gguf" in failure.message
    assert (await running.status(job)).steps[0].state == "failed"
    clean(running, before)


async def test_a_model_larger_than_any_node_is_refused_with_the_numbers(running: System) -> None:
    job = await running.serve(name="huge", memory=10_000 * GIB)
    failure = await failure_of(job)
    assert failure.type == Reason.DOES_NOT_FIT
    assert "9.8 TiB" in failure.message
    assert "n1" in failure.message
    assert (await running.status(job)).steps[2].state == "failed"
    assert "huge" not in (await running.state()).models
    assert running.engines() == []


async def test_an_engine_argument_that_is_refused_ends_the_job_with_the_line(running: System) -> None:
    job = await running.serve(name="flagged", args=["no_such_setting=1"])
    failure = await failure_of(job)
    assert failure.type == Reason.BAD_FLAG
    assert "no_such_setting" in failure.message
    state = await running.state()
    assert state.replicas["flagged-0"].shards == ()
    assert running.engines() == []
    await (await running.job({"kind": "remove", "name": "flagged"})).result()


async def test_a_full_disk_under_the_mirror_is_a_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    async with system(tmp_path) as small:
        with small_disk(tmp_path / "mirror", "8m") as mirror:
            small.start_worker()
            small.start_agent("n1")
            await small.ready("n1")
            job = await small.serve()
            failure = await failure_of(job)
            assert failure.type == Reason.DISK_FULL
            assert str(mirror) in failure.message
            assert (await small.status(job)).steps[1].state == "failed"
            assert [path for path in mirror.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
            small.kill("worker")


async def test_a_full_disk_on_the_node_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    async with system(tmp_path) as small:
        with small_disk(tmp_path / "n1", "16m"):
            small.start_worker()
            small.start_agent("n1")
            await small.ready("n1")
            job = await small.serve()
            failure = await failure_of(job)
            assert failure.type == Reason.DOES_NOT_FIT
            assert "disk" in failure.message
            assert "n1" in failure.message
            assert (await small.status(job)).steps[2].state == "failed"
            assert (await small.state()).models == {}
            small.kill("n1")


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own that is soon full; mounting one needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place.mkdir()
    mount = ["/usr/bin/env", "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["/usr/bin/env", "umount", "--lazy", str(place)], check=True)


async def test_two_nodes_share_the_replicas_and_a_lost_one_is_replaced(tmp_path: Path) -> None:
    async with system(tmp_path) as pair:
        pair.start_worker()
        pair.start_agent("n1")
        pair.start_agent("n2")
        await pair.ready("n1", "n2")
        result = await (await pair.serve(replicas=2)).result()
        assert result.sentence == "tiny is serving: 2 replicas on n1, n2"
        lost = next(replica for replica in (await pair.state()).replicas.values() if replica.nodes == ("n1",))
        pair.kill("n1")
        moved = await pair.serving(lost.id, after=lost.generation)
        assert moved.nodes == ("n2",)
        assert await chat(moved.endpoint)
        # The agent returns: its engine of the older generation is stopped, and exactly two run.
        old = [process.pid for process in pair.engines() if str(tmp_path / "n1") in " ".join(process.cmdline())]
        assert old
        pair.start_agent("n1")
        await until(lambda: not any(psutil.pid_exists(pid) for pid in old), 30.0)
        assert {r.nodes for r in (await pair.state()).replicas.values()} == {("n2",)}


async def test_the_worker_says_where_temporal_is_not(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("mirror: {path: mirror}\n")
    root = Path(__file__).parent.parent
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(root / "worker.py"),
        "--config",
        str(config),
        env={**os.environ, "TEMPORAL_ADDRESS": "127.0.0.1:9", "PYTHONPATH": str(root)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), 20)
        assert b"Temporal is not reachable at 127.0.0.1:9: start it" in line
    finally:
        process.terminate()
        await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0

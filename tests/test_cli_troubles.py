"""What ctl says when something is away, dead, cut off or mistyped: against a real Temporal, with toy workflows."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.contract import (
    CONTROL_QUEUE,
    FLEET_WORKFLOW,
    MODEL_JOB_WORKFLOW,
    RECONCILE_WORKFLOW,
    SEARCH_ATTRIBUTES,
    JobResult,
    JobState,
    JobStatus,
    PassPlan,
    StepState,
    StepStatus,
    fleet_id,
    reconcile_id,
)
from cli.errors import CtlError
from cli.home import Home, SystemRecord
from cli.job_status import ask, closed, status
from cli.jobs import AWAY, Silence, missing_file
from cli.processes import ProcessRecord, boot_id
from cli.session import Session
from cli.system import ended_pass
from cli.views import replica_row, replica_views
from fleet.reasons import Failure, Reason
from fleet.spec import JobKind, JobRequest
from fleet.state import ReplicaState
from runtime.temporal import UnreachableError, connect, plugins, register_search_attributes
from tests.ctl import Ctl, ctl_environment
from tests.test_cli_jobs import TEMPORAL, OneNode, OneStep, ToyJob
from tests.test_cli_views import changed, serving
from tests.waiting import until


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    """Of a Temporal without a worker."""
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(TEMPORAL), plugins=plugins(), dev_server_log_level="error"
    ) as server:
        await register_search_attributes(server.client, SEARCH_ATTRIBUTES)
        yield server.client


@asynccontextmanager
async def working(client: Client) -> AsyncIterator[None]:
    """A control worker."""
    async with Worker(
        client,
        task_queue=CONTROL_QUEUE,
        workflows=[ToyJob, OneNode, OneStep],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield


@pytest.fixture
def ctl(client: Client, tmp_path: Path) -> Ctl:
    return Ctl(ctl_environment(tmp_path / "home", client.service_client.config.target_host))


# -- no worker --------------------------------------------------------------------------------------------------------


async def test_a_job_that_nobody_runs_says_so_and_goes_on(ctl: Ctl, client: Client) -> None:
    process = await ctl.start("model", "serve", "org/name", "--name", "waits")
    try:
        assert process.stderr is not None
        assert (await asyncio.wait_for(process.stderr.readline(), 30)).decode() == f"{AWAY}\n"
        async with working(client):
            out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert out.decode().startswith("waits serves\n")
    assert AWAY not in err.decode()


async def test_a_pass_that_nobody_runs_says_so_and_goes_on(ctl: Ctl, client: Client) -> None:
    process = await ctl.start("reconcile", "--json")
    try:
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
        assert said.startswith("the control worker does not answer: reconcile/main goes on when it is back")
        async with working(client):
            out, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert [step["kind"] for step in json.loads(out)] == ["drain"]


async def test_a_pass_that_nobody_ever_runs_stays(client: Client, tmp_path: Path) -> None:
    handle = await client.start_workflow(
        RECONCILE_WORKFLOW, {"cell": "c"}, id=reconcile_id("c"), task_queue=CONTROL_QUEUE, result_type=PassPlan
    )
    try:
        with pytest.raises(CtlError, match="reconcile/c was started and stays"):
            await ended_pass(Session(client, Home(tmp_path), "c"), handle, quiet_s=0.1, more_s=0.1)
    finally:
        await handle.terminate()


def test_a_silence_is_told_once_until_somebody_answers() -> None:
    said: list[str] = []
    silence = Silence(said.append)
    silence.unanswered(0.0, 1.0)
    assert said == []
    silence.unanswered(1.0, 5.0)
    silence.unanswered(5.0, 10.0)
    assert said == [AWAY]
    silence.heard()
    silence.unanswered(11.0, 12.0)
    assert said == [AWAY]
    silence.unanswered(12.0, 17.0)
    assert said == [AWAY, AWAY]


# -- jobs that ended where they could not see it ----------------------------------------------------------------------


async def test_a_job_whose_input_was_refused_says_why(ctl: Ctl, client: Client) -> None:
    handle = await client.start_workflow(
        MODEL_JOB_WORKFLOW, {"replcas": 2}, id="job/serve/refused/1", task_queue=CONTROL_QUEUE
    )
    async with working(client):
        await until(lambda: _over(handle), 30.0)
        code, out, err = await ctl.run("model", "job", "job/serve/refused/1", "--json")
        assert code == 0, err
        told = JobStatus.model_validate_json(out)
        assert told.state is JobState.FAILED
        assert {step.state for step in told.steps} == {StepState.PENDING}
        assert told.failure is not None
        assert told.failure.reason is Reason.BAD_INPUT
        assert told.failure.detail.startswith("replcas: ")
        code, out, _ = await ctl.run("model", "job", "job/serve/refused/1")
        assert out.splitlines()[-1].startswith("failed: replcas: Extra inputs are not permitted")
    # Nobody answers for its steps now; how it ended is known all the same.
    code, out, err = await ctl.run("model", "job", "job/serve/refused/1")
    assert (code, out) == (1, "")
    assert err.startswith("ctl: job job/serve/refused/1 is over (failed): replcas: ")
    assert "(./ctl up starts it)" in err


@pytest.mark.parametrize("how", [JobState.TERMINATED, JobState.TIMED_OUT])
async def test_a_job_that_was_cut_off_has_ended(ctl: Ctl, client: Client, tmp_path: Path, how: JobState) -> None:
    async with working(client):
        handle = await client.start_workflow(
            MODEL_JOB_WORKFLOW,
            JobRequest(repo="org/name", name="slow"),
            id=f"job/serve/slow/{how}",
            task_queue=CONTROL_QUEUE,
            execution_timeout=timedelta(seconds=5) if how is JobState.TIMED_OUT else None,
            result_type=JobResult,
        )
        session = Session(client, Home(tmp_path), "main")
        await until(lambda: _runs(session, handle.id), 30.0)
        if how is JobState.TERMINATED:
            await handle.terminate(reason="out of patience")
        await until(lambda: _over(handle), 30.0)
        code, out, _ = await ctl.run("model", "job", handle.id, "--json")
        assert code == 0
        told = JobStatus.model_validate_json(out)
        end = (await handle.describe()).close_time
        assert end is not None
        assert told.state is how
        [step] = told.steps
        assert (step.state, step.ended_at) == (StepState.FAILED, end.timestamp())
        code, out, _ = await ctl.run("model", "job", handle.id)
        why = {
            JobState.TERMINATED: "terminated: somebody ended it through Temporal (out of patience)",
            JobState.TIMED_OUT: "timed out: it took longer than the timeout it was started with",
        }[how]
        assert out.splitlines()[-1].startswith(why)
        code, _, err = await ctl.run("trace", handle.id)
        assert code == 1
        assert f"{handle.id} is over ({why.partition(':')[0]})" in err


async def test_a_job_that_was_cut_off_before_it_began_has_ended(client: Client, tmp_path: Path) -> None:
    handle = await client.start_workflow(
        MODEL_JOB_WORKFLOW, JobRequest(kind=JobKind.REMOVE, name="m"), id="job/remove/m/1", task_queue=CONTROL_QUEUE
    )
    await handle.terminate(reason="never mind")
    told = await status(Session(client, Home(tmp_path), "main"), handle.id)
    assert (told.kind, told.state) == (JobKind.REMOVE, JobState.TERMINATED)
    assert {step.state for step in told.steps} == {StepState.PENDING}
    assert told.failure is not None
    assert told.failure.detail == "somebody ended it through Temporal (never mind)"


def test_a_job_that_ended_keeps_what_it_said_itself() -> None:
    steps = (
        StepStatus(name="mirror", state=StepState.DONE, started_at=1.0, ended_at=2.0),
        StepStatus(name="check", state=StepState.RUNNING, started_at=2.0),
        StepStatus(name="catalog"),
    )
    told = JobStatus(job="j", kind=JobKind.SERVE, state=JobState.RUNNING, steps=steps)
    failure = Failure(reason=Reason.CANCELLED, detail="gone")
    ended = closed(told, JobState.TERMINATED, 9.0, failure)
    assert [(step.state, step.ended_at) for step in ended.steps] == [
        (StepState.DONE, 2.0),
        (StepState.FAILED, 9.0),
        (StepState.PENDING, 0.0),
    ]
    assert (ended.state, ended.failure) == (JobState.TERMINATED, failure)


async def test_an_id_of_ones_own_is_taken_as_it_is(ctl: Ctl, client: Client) -> None:
    async with working(client):
        await client.start_workflow(
            MODEL_JOB_WORKFLOW, JobRequest(repo="o/n", name="own"), id="my/own/1", task_queue=CONTROL_QUEUE
        )
        code, out, err = await ctl.run("model", "job", "my/own/1")
        assert code == 0, err
        assert out.startswith("my/own/1: done")
        code, out, err = await ctl.run("model", "job", "serve/none/1")
        assert (code, err.splitlines()[0][:40]) == (1, "ctl: there is no job job/serve/none/1: `")


# -- the fleet --------------------------------------------------------------------------------------------------------


async def test_a_fleet_that_ended_is_not_shown_as_alive(ctl: Ctl, client: Client) -> None:
    async with working(client):
        handle = await client.start_workflow(FLEET_WORKFLOW, id=fleet_id("main"), task_queue=CONTROL_QUEUE)
        code, out, err = await ctl.run("model", "list")
        assert code == 0, err
        for command in (("model", "job"), ("trace",)):
            code, _, err = await ctl.run(*command, "fleet/main")
            assert code == 1
            assert "fleet/main is no job" in err
        await handle.cancel()
        await until(lambda: _over(handle), 30.0)
        says = "fleet main is not running (CANCELED): restart the control worker (./ctl down && ./ctl up)"
        code, out, err = await ctl.run("model", "list")
        assert (code, out, err) == (1, "", f"ctl: {says}\n")
        code, out, _ = await ctl.run("status")
        assert code == 1
        assert says in out


async def test_a_dead_part_is_an_exit_code_and_an_advice(client: Client, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    home.save_system(SystemRecord(port=1, ui_port=2, gateway_port=3))
    dead = ProcessRecord(name="gateway", pid=2**22 + 1, ticks=1, boot=boot_id(), log=home.log("gateway"))
    home.save_process(dead)
    ctl = Ctl(ctl_environment(home.path, client.service_client.config.target_host))
    code, out, _ = await ctl.run("status")
    assert code == 1
    assert f"gateway died: ./ctl up starts it again; {dead.log} says why" in out
    assert "ctl status" not in out
    code, out, _ = await ctl.run("status", "--json")
    assert (code, json.loads(out)["processes"][2]["state"]) == (1, "died")


# -- the connection ---------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of what accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_what_listens_and_stays_silent_is_a_sentence_in_time(silent: str, tmp_path: Path) -> None:
    away = Ctl(ctl_environment(tmp_path / "home", silent))
    for command in (("model", "list"), ("status",)):
        code, out, err = await asyncio.wait_for(away.run(*command), 15)
        assert f"something listens at {silent}, but it does not answer as Temporal does: " in out + err
        assert command == ("status",) or code == 1


async def test_where_nothing_listens_it_says_so() -> None:
    with pytest.raises(UnreachableError, match=r"Temporal is not reachable at 127\.0\.0\.1:1: start it"):
        await connect("127.0.0.1:1")


# -- what was typed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("repo", "code", "says"),
    [
        ("", 2, "repo is empty"),
        ("  ", 2, "repo is empty"),
        ("absent.gguf", 1, "ctl: no file absent.gguf here; a repo on the hub is org/name"),
        ("./absent.gguf", 1, "ctl: no file ./absent.gguf here"),
    ],
)
async def test_a_repo_that_cannot_be_is_refused_at_once(tmp_path: Path, repo: str, code: int, says: str) -> None:
    away = Ctl(ctl_environment(tmp_path / "home", "127.0.0.1:1"))
    returned, out, err = await away.run("model", "serve", repo)
    assert (returned, out) == (code, "")
    assert says in err


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("here.gguf", False),
        ("./here.gguf", False),
        ("absent.gguf", True),
        ("../absent", True),
        ("models/absent.gguf", True),
        ("a/b/absent.gguf", True),
        ("org/name.gguf", False),
        ("org/name", False),
        ("org/name:model.gguf", False),
        ("/elsewhere/absent.gguf", False),
        ("https://example.org/m.gguf", False),
        ("file:here.gguf", False),
        ("file:absent.gguf", True),
        ("file:models", False),
        ("file:/elsewhere/absent.gguf", False),
    ],
)
def test_what_can_only_be_a_file_must_be_here(tmp_path: Path, text: str, missing: bool) -> None:
    (tmp_path / "here.gguf").touch()
    (tmp_path / "models").mkdir()
    assert missing_file(text, tmp_path) is missing


async def test_a_command_without_its_group_is_named(tmp_path: Path) -> None:
    code, _, err = await Ctl(ctl_environment(tmp_path / "home", "127.0.0.1:1")).run("serve", "org/name")
    assert (code, "it is `ctl model serve`" in err) == (2, True)


async def test_ctrl_c_while_it_starts_is_quiet(ctl: Ctl) -> None:
    """The signal comes while the imports run: the first of them is seen in the process's open files."""
    script = """
import os, signal, sys
class First:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, First())
sys.argv = ["ctl", "status"]
import runpy
runpy.run_module("cli", run_name="__main__")
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        env=ctl.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (128 + signal.SIGINT, b"", b"")


# -- sentences --------------------------------------------------------------------------------------------------------


def test_a_failure_of_before_is_told_as_past_and_with_the_replicas_name() -> None:
    broke = Failure(reason=Reason.EXITED, detail="it broke", node="n1")
    state = changed(serving(), "m-0", ReplicaState.FAILED, failure=broke)
    [failed] = replica_views(state)
    assert replica_row(failed)[-1] == "it broke (on n1) — read the engine's log: `ctl replica logs m-0`"
    record = state.replicas["m-0"].model_copy(update={"state": ReplicaState.SERVING})
    [again] = replica_views(state.with_replica(record))
    assert replica_row(again)[-1].startswith("restarted after: it broke (on n1)")


async def _runs(session: Session, job: str) -> bool:
    try:
        return (await ask(session, job)).state is JobState.RUNNING
    except CtlError:
        return False  # its first task is not over


async def _over(handle: object) -> bool:
    described = await handle.describe()  # type: ignore[attr-defined]
    return described.close_time is not None

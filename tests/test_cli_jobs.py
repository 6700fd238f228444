"""ctl against a real Temporal with toy workflows: what it starts, shows, and says when something fails."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.contract import (
    CONTROL_QUEUE,
    FLEET_WORKFLOW,
    MODEL_JOB_WORKFLOW,
    QUERY_SNAPSHOT,
    QUERY_STATUS,
    RECONCILE_WORKFLOW,
    SEARCH_ATTRIBUTES,
    JobResult,
    JobState,
    JobStatus,
    PassPlan,
    SmokeResult,
    Snapshot,
    StepState,
    StepStatus,
    fleet_id,
)
from cli.job_status import with_prefix
from cli.jobs import job_prefix, repo_argument
from fleet.reasons import Failure, Reason
from fleet.spec import JobKind, JobRequest
from fleet.steps import Step, StepKind
from runtime.temporal import plugins, register_search_attributes
from tests.ctl import Ctl, ctl_environment
from tests.fleets import fleet, inventory, spec
from tests.waiting import until

TEMPORAL = Path(sys.executable).parent / "temporal"
BROKEN = Failure(reason=Reason.WEIGHTS_UNREADABLE, detail="/m.gguf is no GGUF file")


@workflow.defn(name=MODEL_JOB_WORKFLOW)
class ToyJob:
    """A name that begins with "bad" fails at the check; one that begins with "slow" waits for a signal."""

    @workflow.init
    def __init__(self, request: JobRequest) -> None:
        self._request = request
        self._state = JobState.RUNNING
        self._check = StepState.RUNNING
        self._go_on = False

    @workflow.run
    async def run(self, request: JobRequest) -> JobResult:
        name = request.name or "m"
        if name.startswith("slow"):
            await workflow.wait_condition(lambda: self._go_on)
        if name.startswith("bad"):
            self._state, self._check = JobState.FAILED, StepState.FAILED
            raise ApplicationError(
                BROKEN.detail, BROKEN.model_dump(mode="json"), type=BROKEN.reason.value, non_retryable=True
            )
        self._state, self._check = JobState.DONE, StepState.DONE
        smoke = SmokeResult(answer=" Paris. ", seconds=0.5, completion_tokens=3, tokens_per_second=6.0)
        return JobResult(model=name, sentence=f"{name} serves", smoke_test=smoke)

    @workflow.signal
    def go_on(self) -> None:
        self._go_on = True

    @workflow.query(name=QUERY_STATUS)
    def status(self) -> JobStatus:
        return JobStatus(
            job=workflow.info().workflow_id,
            kind=self._request.kind,
            state=self._state,
            repo=self._request.repo or "",
            steps=(StepStatus(name="check", state=self._check, detail="looking"),),
            failure=BROKEN if self._state is JobState.FAILED else None,
        )


@workflow.defn(name=FLEET_WORKFLOW)
class OneNode:
    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query(name=QUERY_SNAPSHOT)
    def snapshot(self) -> Snapshot:
        return Snapshot(state=fleet({"n1": inventory()}, spec("m")))


@workflow.defn(name=RECONCILE_WORKFLOW)
class OneStep:
    @workflow.run
    async def run(self, input: dict[str, str]) -> PassPlan:
        step = Step(kind=StepKind.DRAIN, reason=f"asked in {input['cell']}", model="m", replica="m-0")
        return PassPlan(steps=(step,))


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[Client]:
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(TEMPORAL), plugins=plugins(), dev_server_log_level="error"
    ) as server:
        await register_search_attributes(server.client, SEARCH_ATTRIBUTES)
        async with Worker(
            server.client,
            task_queue=CONTROL_QUEUE,
            workflows=[ToyJob, OneNode, OneStep],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            await server.client.start_workflow(FLEET_WORKFLOW, id=fleet_id("main"), task_queue=CONTROL_QUEUE)
            yield server.client


@pytest.fixture
def ctl(client: Client, tmp_path: Path) -> Ctl:
    return Ctl(ctl_environment(tmp_path / "home", client.service_client.config.target_host))


async def test_a_job_that_succeeds(ctl: Ctl) -> None:
    code, out, err = await ctl.run("model", "serve", "hf:org/name", "--name", "good")
    assert (code, out) == (0, 'good serves\nit answered "Paris." in 500 ms (6 tokens/s)\n')
    assert "✓ check: done: looking" in err


async def test_jobs_are_numbered_listed_and_shown(ctl: Ctl, client: Client) -> None:
    for number in (1, 2):
        code, out, _ = await ctl.run("model", "serve", "org/name", "--name", "counted", "--no-wait")
        assert (code, out) == (0, f"job/serve/counted/{number}\n")
    described = await client.get_workflow_handle("job/serve/counted/2").describe()
    assert await described.static_summary() == "serve counted"

    async def listed() -> list[dict[str, object]] | None:
        _, text, _ = await ctl.run("model", "jobs", "--json")
        jobs = [job for job in json.loads(text) if job["id"].startswith("job/serve/counted/")]
        return jobs if [job["state"] for job in jobs] == ["done", "done"] else None

    jobs = await until(listed, timeout=30)
    assert [job["id"] for job in jobs] == ["job/serve/counted/2", "job/serve/counted/1"]
    assert set(jobs[0]) == {"id", "state", "model", "started_at", "ended_at", "trace_id"}

    code, out, _ = await ctl.run("model", "job", "serve/counted/1", "--json")
    assert code == 0
    assert JobStatus.model_validate_json(out).state is JobState.DONE
    code, out, _ = await ctl.run("model", "job", "job/serve/counted/1")
    assert "job/serve/counted/1: done" in out


async def test_a_job_that_fails_says_at_which_step_and_why(ctl: Ctl) -> None:
    code, out, err = await ctl.run("model", "serve", "file:/m.gguf", "--name", "bad")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"ctl: failed at check: {BROKEN.sentence}"
    code, out, _ = await ctl.run("model", "job", "job/serve/bad/1")
    assert (code, out.splitlines()[-1]) == (0, f"failed: {BROKEN.sentence}")


async def test_ctrl_c_leaves_the_job_alone(ctl: Ctl, client: Client) -> None:
    process = await ctl.start("model", "serve", "org/name", "--name", "slow")
    try:
        assert process.stderr is not None
        assert await process.stderr.readline() == "▸ check: running: looking\n".encode()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130
    assert out.decode().startswith("the job goes on: `ctl model job job/serve/slow/1` shows it")
    assert err == b""
    handle = client.get_workflow_handle("job/serve/slow/1", result_type=JobResult)
    await handle.signal("go_on")
    assert (await handle.result()).sentence == "slow serves"


async def test_an_id_that_a_shell_would_take_apart_is_quoted_where_it_is_to_be_typed(ctl: Ctl, client: Client) -> None:
    request = JobRequest(repo="org/name", name="slow").model_dump(mode="json", exclude_unset=True)
    handle = await client.start_workflow(MODEL_JOB_WORKFLOW, request, id="my job; x", task_queue=CONTROL_QUEUE)
    code, out, _ = await ctl.run("model", "job", "cancel", "my job; x", "--no-wait")
    assert (code, out) == (0, "my job; x is being cancelled: `ctl model job 'my job; x'` shows it\n")
    with pytest.raises(WorkflowFailureError):
        await handle.result()


async def test_listings_and_status(ctl: Ctl) -> None:
    for command, key, value in (("node", "id", "n1"), ("model", "name", "m")):
        code, out, _ = await ctl.run(command, "list", "--json")
        assert code == 0
        [entry] = json.loads(out)
        assert entry[key] == value
    code, out, _ = await ctl.run("replica", "list")
    assert (code, out) == (0, "no replica exists; ctl model serve REPO\n")
    code, _, err = await ctl.run("replica", "show", "m-0")
    assert (code, err) == (1, "ctl: no replica is named m-0; there are: none\n")
    code, out, _ = await ctl.run("status", "--json")
    status = json.loads(out)
    assert set(status) == {
        "home", "processes", "temporal", "ui", "gateway", "problem", "brake", "nodes", "models", "replicas",
        "waiting", "forced",
    }  # fmt: skip
    assert [process["state"] for process in status["processes"]] == ["stopped"] * 4
    assert status["nodes"][0]["id"] == "n1"
    assert status["problem"] == ""


async def test_a_pass_shows_its_steps(ctl: Ctl) -> None:
    code, out, _ = await ctl.run("reconcile", "--json")
    assert code == 0
    [step] = json.loads(out)
    assert (step["kind"], step["reason"]) == ("drain", "asked in main")
    code, out, _ = await ctl.run("reconcile")
    assert out.splitlines()[1].split() == ["drain", "m", "m-0", "asked", "in", "main"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("model", "job", "job/serve/none/1"), 1, "ctl: there is no job job/serve/none/1"),
        (("replica", "logs", "nobody"), 1, "ctl: no replica is named nobody; there are: none"),
        (("trace", "nobody"), 1, "and there is no job nobody"),
        (("trace", "a" * 32), 1, "ctl: no span of"),
        (("model", "serve", "x", "--replicas", "-1"), 2, "replicas: Input should be greater than or equal to 0"),
        (("model", "serve", "x", "--memory", "lots"), 2, "memory: "),
        (("model", "serve", "x", "--arg", "--seed=1", "--arg", ""), 2, "args.1: String should have at least 1"),
        (("model", "serve"), 2, "Missing argument"),
        (("model", "serve", "x", "--label", "zone"), 2, "--label: 'zone' is not KEY=VALUE, such as zone=a"),
        (("model", "serve", "x", "--min", "3", "--max", "2"), 2, "min 3 is more than max 2"),
        (("model", "serve", "x", "--max-surge", "0"), 2, "nothing could ever be replaced"),
        (("up", "--port", "70000"), 2, "Input should be less than or equal to 65535"),
    ],
)
async def test_what_cannot_be_done_is_a_sentence(ctl: Ctl, arguments: tuple[str, ...], code: int, says: str) -> None:
    returned, out, err = await ctl.run(*arguments)
    assert (returned, out) == (code, "")
    assert says in err
    assert "Traceback" not in err


async def test_temporal_that_is_away_is_a_sentence(tmp_path: Path) -> None:
    away = Ctl(ctl_environment(tmp_path / "home", "127.0.0.1:1"))
    for arguments in (("model", "list"), ("model", "serve", "x"), ("reconcile",), ("replica", "logs", "m-0")):
        code, out, err = await away.run(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith("ctl: Temporal is not reachable at 127.0.0.1:1")
        assert len(err.splitlines()) == 1


async def test_logs_on_this_machine_need_no_temporal(tmp_path: Path) -> None:
    home = tmp_path / "home"
    logs = home / "node" / "logs" / "m-0.0"
    logs.mkdir(parents=True)
    (home / "agent.yaml").write_text("data: node\n")
    (logs / "1-1.log").write_text("old\n")
    (logs / "2-1.log").write_text("one\ntwo\nthree\n")
    os.utime(logs / "1-1.log", (1, 1))
    away = Ctl(ctl_environment(home, "127.0.0.1:1"))
    code, out, err = await away.run("replica", "logs", "m-0", "--lines", "2")
    assert (code, out, err) == (0, "two\nthree\n", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", "org/name"),
        ("org/name@main:Q4_K_M", "org/name@main:Q4_K_M"),
        ("hf:org/name", "hf:org/name"),
        ("https://example.org/m.gguf", "https://example.org/m.gguf"),
        ("file:/models/m.gguf", "file:/models/m.gguf"),
        ("./m.gguf", "file:{cwd}/m.gguf"),
        ("../m.gguf", "file:{parent}/m.gguf"),
        ("/models/m.gguf", "file:/models/m.gguf"),
        ("here.gguf", "file:{cwd}/here.gguf"),
        ("absent.gguf", "absent.gguf"),
        ("file:here.gguf", "file:{cwd}/here.gguf"),
        ("file:./absent.gguf", "file:{cwd}/absent.gguf"),
        ("file:../m.gguf", "file:{parent}/m.gguf"),
        ("file:", "file:"),
        ("file://host/m.gguf", "file://host/m.gguf"),
    ],
)
def test_a_path_becomes_a_file_reference(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "here.gguf").touch()
    assert repo_argument(text, tmp_path) == expected.format(cwd=tmp_path, parent=tmp_path.parent)


@pytest.mark.parametrize(
    ("request_", "prefix"),
    [
        (JobRequest(repo="file:/models/smollm2.gguf"), "job/serve/smollm2/"),
        (JobRequest(repo="org/name", name="qwen"), "job/serve/qwen/"),
        (JobRequest(kind=JobKind.REMOVE, name="qwen"), "job/remove/qwen/"),
    ],
)
def test_the_id_of_a_job(request_: JobRequest, prefix: str) -> None:
    assert job_prefix(request_) == prefix
    assert "'" not in job_prefix(JobRequest(repo="it's' OR 1=1"))


def test_a_job_can_be_named_without_its_prefix() -> None:
    assert with_prefix("serve/m/1") == "job/serve/m/1"
    assert with_prefix("job/serve/m/1") == "job/serve/m/1"
    assert with_prefix("started-elsewhere") == "started-elsewhere"

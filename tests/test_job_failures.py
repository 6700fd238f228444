"""Every reason that can end a job, at its step: shown, typed for the caller, and leaving nothing behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError

from activities import contract
from activities.contract import (
    CheckRequest,
    CheckResult,
    JobResult,
    JobState,
    MirrorRequest,
    MirrorResult,
    ResolveRequest,
    SmokeRequest,
    SmokeResult,
    StepState,
)
from activities.node_contract import StartShard
from fleet.reasons import REASONS, Failure, Reason, StepError
from fleet.spec import ResolvedModel
from fleet.state import Policy, RestartPolicy
from tests.control import Answers, Cell, control_plane
from tests.waiting import until

BY_STEP = {
    "registry": (
        Reason.REPO_NOT_FOUND,
        Reason.REVISION_NOT_FOUND,
        Reason.REPO_FORBIDDEN,
        Reason.TOKEN_UNKNOWN,
        Reason.NO_WEIGHTS,
        Reason.HUB_UNREACHABLE,
        Reason.HUB_BUSY,
        Reason.BAD_INPUT,
    ),
    "mirror": (Reason.WEIGHTS_MISSING, Reason.DISK_FULL, Reason.NOT_WRITABLE, Reason.REPO_FORBIDDEN),
    "check": (
        Reason.WEIGHTS_UNREADABLE,
        Reason.DOES_NOT_FIT,
        Reason.FIT_UNKNOWN,
        Reason.UNSUPPORTED_ARCHITECTURE,
        Reason.GPU_COUNT,
    ),
    "placement": (
        Reason.INSTALL_FAILED,
        Reason.BAD_FLAG,
        Reason.EXITED,
        Reason.OUT_OF_MEMORY,
        Reason.GPU_OUT_OF_MEMORY,
        Reason.NEVER_READY,
        Reason.PORT_IN_USE,
        Reason.WEIGHTS_CORRUPT,
        Reason.UNSUPPORTED_ARCHITECTURE,
    ),
    "smoke test": (Reason.SMOKE_TEST_FAILED,),
}
"""With those that waiting makes no better; what else can end a job has its own test (no room, a queue, a cancel)."""


def name_of(step: str, reason: Reason) -> str:
    return f"{step.replace(' ', '-')}.{reason.value}"


class ByName(Answers):
    """Fails as the model's name says: `check.does_not_fit`; `hang` waits for the cancellation there."""

    async def at(self, step: str, name: str) -> None:
        where, _, reason = name.rpartition("/")[2].partition(".")
        if where != step:
            return
        if reason.startswith("hang"):
            await asyncio.Event().wait()
        raise StepError(Reason(reason), f"{name} was made to fail")

    @activity.defn(name=contract.RESOLVE_MODEL)
    async def resolve_model(self, request: ResolveRequest) -> ResolvedModel:
        await self.at("registry", request.repo)
        return await super().resolve_model(request)

    @activity.defn(name=contract.MIRROR_MODEL)
    async def mirror_model(self, request: MirrorRequest) -> MirrorResult:
        await self.at("mirror", request.resolved.repo)
        return await super().mirror_model(request)

    @activity.defn(name=contract.CHECK_FIT)
    async def check_fit(self, request: CheckRequest) -> CheckResult:
        self.calls.append(request.request.name or "")
        await self.at("check", request.request.name or "")
        return await super().check_fit(request)

    @activity.defn(name=contract.SMOKE_TEST)
    async def smoke_test(self, request: SmokeRequest) -> SmokeResult:
        await self.at("smoke-test", request.model)
        return await super().smoke_test(request)

    async def start(self, request: StartShard) -> None:
        await self.at("placement", request.model)


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    policy = Policy(restart=RestartPolicy(base_s=0.1, attempts=2))
    async with control_plane(client, policy=policy, answers=ByName()) as made:
        yield made


async def begin(cell: Cell, name: str) -> WorkflowHandle[Any, JobResult]:
    return await cell.start({"repo": f"org/{name}", "name": name})


async def test_every_reason_ends_its_job_at_its_step(cell: Cell) -> None:
    assert isinstance(cell.answers, ByName)
    async with cell.node("n1", memory=64 * 1024**3, start=cell.answers.start) as node:
        await node.join()
        wanted = [(step, reason) for step, reasons in BY_STEP.items() for reason in reasons]
        jobs = await asyncio.gather(*(begin(cell, name_of(step, reason)) for step, reason in wanted))
        for (step, reason), job in zip(wanted, jobs, strict=True):
            with pytest.raises(WorkflowFailureError) as caught:
                await job.result()
            error = caught.value.cause
            assert isinstance(error, ApplicationError)
            assert error.type == reason
            failure = Failure.model_validate(error.details[0])
            assert (failure.reason, error.message) == (reason, failure.sentence)
            assert REASONS[reason].advice in error.message
            status = await cell.status(job)
            assert (status.state, status.failure) == (JobState.FAILED, failure)
            rows = {row.name: row for row in status.steps}
            assert rows[step].state is StepState.FAILED, (step, reason, status)
            assert rows[step].detail == failure.line
            after = [row.state for row in status.steps[contract.STEPS.index(step) + 1 :]]
            assert set(after) <= {StepState.PENDING}
        assert cell.answers.calls.count(name_of("check", Reason.GPU_COUNT)) == 1, "no GPU comes by asking again"
        models = (await cell.state()).models
        assert {name.partition(".")[0] for name in (model.spec.name for model in models.values())} <= {
            "placement",
            "smoke-test",
        }


async def test_a_job_is_cancelled_at_any_moment(cell: Cell) -> None:
    """Also while its word to Fleet is under way, or an activity that does not hear of it in time ends well."""
    assert isinstance(cell.answers, ByName)
    async with cell.node("n1", start=cell.answers.start) as node:
        await node.join()

        async def one(number: int) -> None:
            # The moments fall where they may: each job of some 0.3 s is cancelled 3 ms later than the one before.
            job = await begin(cell, f"smoke-test.hang-{number}")
            await asyncio.sleep(number * 0.003)
            await job.cancel()
            with pytest.raises(WorkflowFailureError) as caught:
                await asyncio.wait_for(job.result(), 60.0)
            assert isinstance(caught.value.cause, CancelledError), number
            assert (await cell.status(job)).state is JobState.CANCELLED

        for first in range(0, 120, 20):
            await asyncio.gather(*(one(number) for number in range(first, first + 20)))


@pytest.mark.parametrize("step", ["registry", "mirror", "check", "placement", "smoke-test"])
async def test_a_job_is_cancelled_at_any_step(cell: Cell, step: str) -> None:
    assert isinstance(cell.answers, ByName)
    async with cell.node("n1", start=cell.answers.start) as node:
        await node.join()
        job = await begin(cell, f"{step}.hang")

        async def there() -> bool:
            row = (await cell.status(job)).steps[contract.STEPS.index(step.replace("-", " "))]
            return row.state is StepState.RUNNING and (step != "placement" or bool(node.started))

        await until(there, 30.0)
        await job.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await job.result()
        assert isinstance(caught.value.cause, CancelledError)
        status = await cell.status(job)
        assert status.state is JobState.CANCELLED
        assert [row.name for row in status.steps if row.state is StepState.FAILED] == [step.replace("-", " ")]

        async def clean() -> bool:
            state = await cell.state()
            kept = 1 if step == "smoke-test" else 0  # it serves, and stays
            return (len(state.models), len(state.replicas), len(node.running)) == (kept, kept, kept)

        await until(clean, 30.0)
        snapshot: contract.Snapshot = await cell.fleet.query(contract.QUERY_SNAPSHOT, result_type=contract.Snapshot)
        assert snapshot.queues == {}

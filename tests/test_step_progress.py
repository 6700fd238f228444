"""What ctl says of a step that is tried again: which attempt it is, and what became of the one before."""

from pathlib import Path

import pytest
from temporalio import activity
from temporalio.api.failure.v1 import Failure, TimeoutFailureInfo
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client

from activities import contract
from activities.contract import MirrorRequest, MirrorResult
from cli import job_status
from cli.home import Home
from cli.session import Session
from cli.step_progress import again
from fleet.progress import Progress
from fleet.reasons import Reason, StepError
from tests.control import Answers, control_plane
from tests.waiting import until


@pytest.mark.parametrize(
    ("pending", "said"),
    [
        (PendingActivityInfo(attempt=1, maximum_attempts=6), ""),
        (
            PendingActivityInfo(attempt=2, maximum_attempts=6, last_failure=Failure(message="h is away")),
            "attempt 2 of 6, as the one before failed: h is away",
        ),
        (
            PendingActivityInfo(
                attempt=3,
                last_failure=Failure(message="activity timeout", timeout_failure_info=TimeoutFailureInfo()),
            ),
            "attempt 3, as the one before failed: it was heard of no more",
        ),
    ],
)
def test_an_attempt_in_words(pending: PendingActivityInfo, said: str) -> None:
    assert again(pending) == said


class Away(Answers):
    """A hub that is away once it has given a part."""

    @activity.defn(name=contract.MIRROR_MODEL)
    async def mirror_model(self, request: MirrorRequest) -> MirrorResult:
        activity.heartbeat(Progress(said="1 GiB of 4 GiB"))
        raise StepError(Reason.HUB_UNREACHABLE, "the hub is away")


async def test_a_mirror_step_that_is_tried_again_says_so(client: Client, tmp_path: Path) -> None:
    async with control_plane(client, answers=Away()) as cell:
        session = Session(cell.client, Home(tmp_path / "home"), cell.name)
        job = await cell.start({"repo": "org/m", "name": "m"})

        async def said() -> bool:
            rows = {step.name: step for step in (await job_status.ask(session, job.id)).steps}
            return rows["mirror"].progress.endswith("attempt 2 of 6, as the one before failed: the hub is away")

        await until(said, 30.0)
        assert "1 GiB of 4 GiB; attempt 2 of 6" in _mirror(await job_status.status(session, job.id))
        await job.cancel()


def _mirror(status: contract.JobStatus) -> str:
    return next(step.progress for step in status.steps if step.name == "mirror")

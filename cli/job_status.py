"""How one job stands: its own word where it can give it, else what Temporal knows of its end."""

from datetime import datetime
from typing import Any

from temporalio import exceptions
from temporalio.client import (
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import (
    MODEL_JOB_WORKFLOW,
    QUERY_STATUS,
    STEPS,
    JobResult,
    JobState,
    JobStatus,
    StepState,
    StepStatus,
)
from cli.errors import CtlError, failure_of, sentence
from cli.session import QUERY_TIMEOUT, Session
from cli.step_progress import with_progress
from fleet.reasons import Failure, Reason
from fleet.spec import JobKind

JobHandle = WorkflowHandle[Any, JobResult]

STATES = {
    WorkflowExecutionStatus.RUNNING: JobState.RUNNING,
    WorkflowExecutionStatus.CONTINUED_AS_NEW: JobState.RUNNING,
    WorkflowExecutionStatus.COMPLETED: JobState.DONE,
    WorkflowExecutionStatus.FAILED: JobState.FAILED,
    WorkflowExecutionStatus.CANCELED: JobState.CANCELLED,
    WorkflowExecutionStatus.TERMINATED: JobState.TERMINATED,
    WorkflowExecutionStatus.TIMED_OUT: JobState.TIMED_OUT,
}

CUT_OFF = (JobState.TERMINATED, JobState.TIMED_OUT)
"""Ends that the job itself was not told of: its own word is still that it runs."""


def with_prefix(text: str) -> str:
    """What a person calls a job: its whole id, or the id without `job/`."""
    return text if text.startswith("job/") or text.count("/") != 2 else f"job/{text}"


async def find(session: Session, text: str) -> str:
    """The workflow id of the job a person means: the id as it is where there is one, else the one with `job/`."""
    if with_prefix(text) == text:
        return text
    try:
        await session.client.get_workflow_handle(text).describe(rpc_timeout=QUERY_TIMEOUT)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return with_prefix(text)
        raise _unanswered(text) from error
    return text


async def ask(session: Session, job: str) -> JobStatus:
    """What the job says of itself, and how far its transfer is. Raises CtlError where it says nothing."""
    try:
        told = await _ask(session.client.get_workflow_handle(job))
    except RPCError as error:
        raise _none(job, error) from error
    except WorkflowQueryFailedError as error:
        raise _mute(job, error) from error
    return await with_progress(session.client, told)


async def described(session: Session, job: str) -> JobState:
    """Whether a job runs or how it ended, as Temporal knows. Raises CtlError where there is none."""
    return _state(await _describe(session, job))


async def status(session: Session, job: str) -> JobStatus:
    """How a job stands. Raises CtlError where there is none, or nobody answers for it."""
    handle: JobHandle = session.client.get_workflow_handle(job, result_type=JobResult)
    described = await _describe(session, job)
    state = _state(described)
    try:
        told = await _ask(handle)
    except RPCError as error:
        if state is JobState.RUNNING:
            raise _unanswered(job) from error
        if error.status is not RPCStatusCode.FAILED_PRECONDITION:  # this one: it ended before it began
            failure = await _end(handle, state)
            why = f": {failure.sentence}" if failure is not None else ""
            raise CtlError(
                f"job {job} is over ({words(state)}){why}; its steps are told by the control worker, and it does not "
                f"answer (./ctl up starts it)"
            ) from error
        told = blank(job)
    except WorkflowQueryFailedError as error:
        if state is JobState.RUNNING:
            raise _mute(job, error) from error
        told = blank(job)
    if told.state is not JobState.RUNNING or state is JobState.RUNNING:
        return await with_progress(session.client, told, described)
    return closed(told, state, _seconds(described.close_time), await _end(handle, state))


def closed(told: JobStatus, state: JobState, moment: float, failure: Failure | None) -> JobStatus:
    """What a job that could not see its end says, with that end: no clock of it goes on."""

    def ended(step: StepStatus) -> StepStatus:
        if step.state is not StepState.RUNNING:
            return step
        detail = failure.detail if failure is not None else words(state)
        return step.model_copy(update={"state": StepState.FAILED, "ended_at": moment, "detail": detail})

    steps = tuple(ended(step) for step in told.steps)
    return told.model_copy(update={"state": state, "steps": steps, "failure": told.failure or failure})


def words(state: JobState) -> str:
    """For a sentence: `timed out`."""
    return state.value.replace("_", " ")


def told(status: JobStatus, failure: Failure) -> str:
    """A failure of this job's, as a person reads it."""
    return failure.told(replica=status.replicas[0] if len(status.replicas) == 1 else "", model=status.model)


async def _describe(session: Session, job: str) -> WorkflowExecutionDescription:
    try:
        found = await session.client.get_workflow_handle(job).describe(rpc_timeout=QUERY_TIMEOUT)
    except RPCError as error:
        raise _none(job, error) from error
    if found.workflow_type != MODEL_JOB_WORKFLOW:
        raise CtlError(f"{job} is no job: `ctl model jobs` lists those there are")
    return found


async def _ask(handle: WorkflowHandle[Any, Any]) -> JobStatus:
    answer: JobStatus = await handle.query(QUERY_STATUS, result_type=JobStatus, rpc_timeout=QUERY_TIMEOUT)
    return answer


async def _end(handle: JobHandle, state: JobState) -> Failure | None:
    """Why a closed job failed; None where it did not."""
    if state is JobState.DONE:
        return None
    try:
        await handle.result(rpc_timeout=QUERY_TIMEOUT)
    except WorkflowFailureError as error:
        return failure_of(error) or _unnamed(error.cause)
    return None


def _unnamed(cause: BaseException) -> Failure:
    match cause:
        case exceptions.TerminatedError():
            return Failure(reason=Reason.CANCELLED, detail=f"somebody ended it through Temporal ({cause.message})")
        case exceptions.TimeoutError():
            return Failure(reason=Reason.CANCELLED, detail="it took longer than the timeout it was started with")
        case exceptions.CancelledError():
            return Failure(reason=Reason.CANCELLED, detail="it was cancelled")
    return Failure(reason=Reason.INTERNAL, detail=sentence(cause))


def blank(job: str) -> JobStatus:
    """Of a job whose own word is not known, such as one that never came to its first step."""
    parts = job.split("/")
    kind = JobKind(parts[1]) if len(parts) > 1 and parts[1] in set(JobKind) else JobKind.SERVE
    return JobStatus(job=job, kind=kind, state=JobState.RUNNING, steps=tuple(StepStatus(name=name) for name in STEPS))


def _state(described: WorkflowExecutionDescription) -> JobState:
    return STATES.get(described.status, JobState.RUNNING) if described.status is not None else JobState.RUNNING


def _none(job: str, error: RPCError) -> CtlError:
    if error.status is RPCStatusCode.NOT_FOUND:
        return CtlError(f"there is no job {job}: `ctl model jobs` lists those there are")
    return _unanswered(job)


def _mute(job: str, error: WorkflowQueryFailedError) -> CtlError:
    return CtlError(f"job {job} cannot say how it stands: {error}")


def _unanswered(job: str) -> CtlError:
    return CtlError(
        f"job {job} does not answer: the control worker is away, and the job goes on when it is back "
        f"(./ctl up starts it)"
    )


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0

"""Model jobs as ctl starts, finds and follows them."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from temporalio.client import (
    WorkflowExecution,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
)
from temporalio.common import SearchAttributeKey, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import (
    CONTROL_QUEUE,
    MODEL_JOB_WORKFLOW,
    QUERY_STATUS,
    SEARCH_MODEL,
    SEARCH_STATE,
    JobResult,
    JobStatus,
    StepState,
)
from cli.errors import CtlError, JobFailedError, failure_of, sentence
from cli.session import QUERY_TIMEOUT, Session
from cli.views import JobView
from fleet.reasons import REASONS, LlmgwError
from fleet.repos import default_name, parse_repo
from fleet.spec import JobRequest, safe_id

POLL_S = 0.2
TASK_TIMEOUT = timedelta(seconds=5)
"""A worker killed inside a task costs this much before another goes on."""

JobHandle = WorkflowHandle[Any, JobResult]

_STATES = {
    WorkflowExecutionStatus.RUNNING: "running",
    WorkflowExecutionStatus.CONTINUED_AS_NEW: "running",
    WorkflowExecutionStatus.COMPLETED: "done",
    WorkflowExecutionStatus.FAILED: "failed",
    WorkflowExecutionStatus.CANCELED: "cancelled",
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.TIMED_OUT: "timed_out",
}


def repo_argument(text: str, cwd: Path) -> str:
    """A path becomes `file:` with the absolute path: one that begins with `.`, `/` or `~`, or one that exists."""
    path = Path(text).expanduser()
    if text.startswith(("./", "../", "/", "~")) or text in (".", "..") or (":" not in text and (cwd / path).exists()):
        return f"file:{(cwd / path).resolve()}"
    return text


def job_prefix(request: JobRequest) -> str:
    """The job's workflow id without its number."""
    return f"job/{request.kind}/{safe_id(request.name or _name_of(request.repo or ''))}/"


def job_workflow_id(text: str) -> str:
    """What a person calls a job: its whole id, or the id without `job/`."""
    return text if text.startswith("job/") or text.count("/") != 2 else f"job/{text}"


async def start(session: Session, request: JobRequest) -> JobHandle:
    """Start a job under the next free number."""
    prefix = job_prefix(request)
    earlier = await session.client.count_workflows(f"WorkflowId STARTS_WITH '{prefix}'")
    number = earlier.count + 1
    while True:
        try:
            return await session.client.start_workflow(
                MODEL_JOB_WORKFLOW,
                request,
                id=f"{prefix}{number}",
                task_queue=CONTROL_QUEUE,
                task_timeout=TASK_TIMEOUT,
                # Also of one that has ended: a job's number is its own.
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=_summary(request),
                result_type=JobResult,
            )
        except WorkflowAlreadyStartedError:
            number += 1


async def status(session: Session, job: str) -> JobStatus:
    """How a job stands. Raises CtlError where there is none."""
    handle = session.client.get_workflow_handle(job)
    try:
        answer: JobStatus = await handle.query(QUERY_STATUS, result_type=JobStatus, rpc_timeout=QUERY_TIMEOUT)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise CtlError(f"there is no job {job}: `ctl model jobs` lists those there are") from error
        raise CtlError(f"job {job} does not answer: is a control worker running? Look at `ctl status`") from error
    except WorkflowQueryFailedError as error:
        raise CtlError(f"job {job} cannot say how it stands: {error}") from error
    return answer


async def follow(session: Session, handle: JobHandle, show: Callable[[JobStatus], None]) -> JobResult:
    """Show a job until it ends. Raises JobFailedError; being cancelled leaves the job alone."""
    ended = asyncio.create_task(handle.result())
    try:
        while not ended.done():
            await _show(session, handle, show)
            await asyncio.wait({ended}, timeout=POLL_S)
        last = await _show(session, handle, show)
        return await ended
    except WorkflowFailureError as error:
        raise JobFailedError(_failed_sentence(last, error)) from error
    finally:
        ended.cancel()


async def recent(session: Session, limit: int) -> tuple[JobView, ...]:
    """The newest jobs."""
    found = session.client.list_workflows(f"WorkflowType = '{MODEL_JOB_WORKFLOW}'", limit=limit)
    return tuple([_view(execution) async for execution in found])


async def _show(session: Session, handle: JobHandle, show: Callable[[JobStatus], None]) -> JobStatus | None:
    try:
        now = await status(session, handle.id)
    except CtlError:
        return None  # no worker just now: the job goes on when there is one
    show(now)
    return now


def _failed_sentence(last: JobStatus | None, error: WorkflowFailureError) -> str:
    failure = (last.failure if last is not None else None) or failure_of(error)
    if failure is None:
        return f"the job ended without success: {sentence(error)}"
    steps = [step.name for step in last.steps if step.state is StepState.FAILED] if last is not None else []
    step = steps[0] if steps else REASONS[failure.reason].step
    return f"failed at {step}: {failure.sentence}" if step else f"failed: {failure.sentence}"


def _name_of(repo: str) -> str:
    try:
        return default_name(parse_repo(repo))
    except LlmgwError:
        return repo  # the job itself says what is wrong with it


def _summary(request: JobRequest) -> str:
    text = f"{request.kind} {request.name or request.repo or ''}"
    return text if len(text.encode()) < 200 else text.encode()[:190].decode(errors="ignore") + "…"


def _view(execution: WorkflowExecution) -> JobView:
    found = execution.typed_search_attributes
    status_name = _STATES.get(execution.status, "unknown") if execution.status is not None else "unknown"
    told = found.get(SearchAttributeKey.for_keyword(SEARCH_STATE), "")
    return JobView(
        id=execution.id,
        # A job's own word is finer, but one that was terminated could not say so.
        state=told if told and status_name in ("done", "failed", "cancelled") else status_name,
        model=found.get(SearchAttributeKey.for_keyword(SEARCH_MODEL), ""),
        started_at=_seconds(execution.start_time),
        ended_at=_seconds(execution.close_time),
    )


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0

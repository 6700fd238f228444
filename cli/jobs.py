"""Model jobs as ctl starts, finds and follows them."""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from temporalio.client import WorkflowExecution, WorkflowFailureError
from temporalio.common import SearchAttributeKey, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from activities.contract import (
    CONTROL_QUEUE,
    MODEL_JOB_WORKFLOW,
    SEARCH_MODEL,
    SEARCH_STATE,
    SEARCH_TRACE,
    JobResult,
    JobState,
    JobStatus,
    StepState,
)
from cli.command_trace import part
from cli.console import note
from cli.errors import UNANSWERED, CtlError, JobFailedError, failure_of, sentence
from cli.job_status import CUT_OFF, STATES, ask, status, told, words
from cli.job_status import JobHandle as JobHandle
from cli.session import Session
from cli.views import JobView
from fleet.reasons import REASONS, LlmgwError
from fleet.repos import default_name, parse_repo
from fleet.spec import JobRequest, safe_id

POLL_S = 0.2
TASK_TIMEOUT = timedelta(seconds=5)
"""A worker killed inside a task costs this much before another goes on."""

SILENCE_S = 4.5
"""Without an answer for so long, the operator is told; a little less than one query waits."""
AWAY = "the control worker does not answer: the job goes on when it is back (./ctl up starts it)"
AWAY_ALL = "the control worker does not answer: the jobs go on when it is back (./ctl up starts it)"


def repo_argument(text: str, cwd: Path) -> str:
    """A path becomes `file:` with the absolute path: one that begins with `.`, `/` or `~`, one that exists, and one
    behind `file:`."""
    named = path_named(text)
    if named is not None:
        return f"file:{(cwd / named).resolve()}"
    path = Path(text).expanduser()
    if text.startswith(("./", "../", "/", "~")) or text in (".", "..") or (":" not in text and (cwd / path).exists()):
        return f"file:{(cwd / path).resolve()}"
    return text


def missing_file(text: str, cwd: Path) -> bool:
    """Whether this can only be meant as a file here, and there is none. An absolute path may be another machine's."""
    named = path_named(text)
    if named is not None:
        return not (cwd / named).exists()
    if text.startswith(("./", "../", "~")):
        return not (cwd / Path(text).expanduser()).exists()
    # `org/name.gguf` may be a repo, unless `org` is a directory here.
    a_repo = text.count("/") == 1 and not (cwd / text).parent.is_dir()
    looks = text.endswith(".gguf") and ":" not in text and not text.startswith("/") and not a_repo
    return looks and not (cwd / text).exists()


def path_named(text: str) -> Path | None:
    """The path in `file:models/m.gguf`, `file:./m.gguf` or `file:~/m.gguf`; None where nothing is relative."""
    path = text.removeprefix("file:")
    return None if path in (text, "") or path.startswith("/") else Path(path).expanduser()


def job_prefix(request: JobRequest) -> str:
    """The job's workflow id without its number."""
    return f"job/{request.kind}/{safe_id(request.name or _name_of(request.repo or ''))}/"


class Silence:
    """Tells once that nobody answers, and again only after somebody did."""

    def __init__(self, tell: Callable[[str], None], text: str = AWAY) -> None:
        self._tell = tell
        self._text = text
        self._since: float | None = None
        self._told = False

    def heard(self) -> None:
        """There was an answer."""
        self._since, self._told = None, False

    def unanswered(self, asked_at: float, now: float) -> None:
        """A question put at `asked_at` had none; both on the monotonic clock."""
        self._since = asked_at if self._since is None else self._since
        if now - self._since >= SILENCE_S and not self._told:
            self._told = True
            self._tell(self._text)


async def start(session: Session, request: JobRequest) -> JobHandle:
    """Start a job under the next free number."""
    prefix = job_prefix(request)
    with part("start job"):
        earlier = await session.client.count_workflows(f"WorkflowId STARTS_WITH '{prefix}'")
        number = earlier.count + 1
        while True:
            try:
                return await session.client.start_workflow(
                    MODEL_JOB_WORKFLOW,
                    # Of an update, what was not said keeps its value.
                    request.model_dump(mode="json", exclude_unset=True),
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


async def follow(
    session: Session,
    handle: JobHandle,
    show: Callable[[JobStatus], None],
    poll_s: float = POLL_S,
    silence: Silence | None = None,
) -> JobResult:
    """Show a job until it ends. Raises JobFailedError, and CtlError where Temporal goes away; being cancelled leaves
    the job alone.

    `silence` hears of each answer and of each that fails; several jobs that are followed together share one.
    """
    silence = silence or Silence(note)
    ended = asyncio.create_task(handle.result())
    try:
        while not ended.done():
            await _show(session, handle, show, silence, ended)
            await asyncio.wait({ended}, timeout=poll_s)
        gone = ended.exception()
        if isinstance(gone, RPCError) and gone.status in UNANSWERED:
            raise CtlError(
                f"Temporal does not answer any more: {handle.id} goes on when it is back (./ctl up starts it), and "
                f"`ctl model job {handle.id}` shows it"
            ) from gone
        last = await _last(session, handle, show)
        return await ended
    except WorkflowFailureError as error:
        raise JobFailedError(_failed_sentence(last, error)) from error
    finally:
        ended.cancel()


async def recent(session: Session, limit: int) -> tuple[JobView, ...]:
    """The newest jobs."""
    found = session.client.list_workflows(f"WorkflowType = '{MODEL_JOB_WORKFLOW}'", limit=limit)
    return tuple([_view(execution) async for execution in found])


async def _show(
    session: Session,
    handle: JobHandle,
    show: Callable[[JobStatus], None],
    silence: Silence,
    ended: asyncio.Task[JobResult],
) -> None:
    asked_at = time.monotonic()
    asking = asyncio.create_task(ask(session, handle.id))
    try:
        # A query that nobody answers must not hold back the end of the job.
        await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            show(asking.result())
            silence.heard()
    except CtlError:
        silence.unanswered(asked_at, time.monotonic())  # the job goes on when there is a worker
    finally:
        asking.cancel()


async def _last(session: Session, handle: JobHandle, show: Callable[[JobStatus], None]) -> JobStatus | None:
    try:
        now = await status(session, handle.id)
    except CtlError:
        return None  # the worker ended with the job: its result says the rest
    show(now)
    return now


def _failed_sentence(last: JobStatus | None, error: WorkflowFailureError) -> str:
    failure = (last.failure if last is not None else None) or failure_of(error)
    if failure is None:
        return f"the job ended without success: {sentence(error)}"
    ended = words(last.state if last is not None and last.state in CUT_OFF else JobState.FAILED)
    why = told(last, failure) if last is not None else failure.sentence
    steps = [step.name for step in last.steps if step.state is StepState.FAILED] if last is not None else []
    step = steps[0] if steps else REASONS[failure.reason].step
    return f"{ended} at {step}: {why}" if step else f"{ended}: {why}"


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
    status_name: str = STATES.get(execution.status, "unknown") if execution.status is not None else "unknown"
    told = found.get(SearchAttributeKey.for_keyword(SEARCH_STATE), "")
    return JobView(
        id=execution.id,
        # A job's own word is finer, but one that was terminated could not say so.
        state=told if told and status_name in ("done", "failed", "cancelled") else status_name,
        model=found.get(SearchAttributeKey.for_keyword(SEARCH_MODEL), ""),
        started_at=_seconds(execution.start_time),
        ended_at=_seconds(execution.close_time),
        trace_id=found.get(SearchAttributeKey.for_keyword(SEARCH_TRACE), ""),
    )


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0

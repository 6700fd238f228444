"""`ctl model`: the models and their jobs, shown and followed."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from activities.contract import JobResult, SmokeResult
from cli import job_status, jobs
from cli.console import JsonFlag, note, print_json, print_table, run, say
from cli.progress import LineProgress, progress
from cli.session import Session, open_session
from cli.views import MODEL_COLUMNS, JobView, model_row, model_views
from fleet.render import duration, speed
from fleet.spec import JobRequest, Task
from fleet.state import FleetState

app = typer.Typer(help="Models: serve them, see them, remove them.", no_args_is_help=True)

NoWait = Annotated[bool, typer.Option("--no-wait", help="Start the job and return; `ctl model job ID` shows it.")]

JOB_COLUMNS = ("JOB", "STATE", "MODEL", "STARTED", "TOOK")


@app.command("list")
def list_models(as_json: JsonFlag = False) -> None:
    """The models in the catalog.

    Example: ctl model list --json
    """
    views = model_views(run(_fleet()))
    if as_json:
        print_json(views)
    else:
        empty = "no model is in the catalog; serve one: ctl model serve REPO"
        print_table(MODEL_COLUMNS, [model_row(view) for view in views], empty)


@app.command("jobs")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, help="How many, the newest first.")] = 50, as_json: JsonFlag = False
) -> None:
    """The jobs that run and that ran.

    Example: ctl model jobs --limit 5
    """
    views = run(_recent(limit))
    if as_json:
        print_json(views)
    else:
        print_table(
            JOB_COLUMNS, [_job_row(view) for view in views], "no job has run yet; start one: ctl model serve REPO"
        )


async def follow(session: Session, handle: jobs.JobHandle, title: str) -> JobResult:
    """Show a job until it ends, then its result. Raises JobFailedError."""
    with progress(title) as show:
        result = await jobs.follow(session, handle, show)
    say(result.sentence)
    if result.smoke_test is not None:
        say(answered(result.smoke_test))
    return result


async def run_job(request: JobRequest, *, wait: bool, as_json: bool = False) -> None:
    """Start a job in ctl's cell, and follow it to its end."""
    session = await open_session()
    handle = await jobs.start(session, request.model_copy(update={"cell": session.cell}))
    if not wait:
        if as_json:
            print_json(job_status.blank(handle.id))
        else:
            say(handle.id)
        return
    try:
        if as_json:
            await _follow_json(session, handle)
        else:
            await follow(session, handle, handle.id)
    except asyncio.CancelledError:
        tell = note if as_json else say
        tell(f"the job goes on: `ctl model job {handle.id}` shows it, `ctl model job cancel {handle.id}` ends it")
        raise


async def _follow_json(session: Session, handle: jobs.JobHandle) -> None:
    try:
        await jobs.follow(session, handle, LineProgress(note).show)
    finally:
        print_json(await job_status.status(session, handle.id))


async def _fleet() -> FleetState:
    return await (await open_session()).state()


async def _recent(limit: int) -> tuple[JobView, ...]:
    return await jobs.recent(await open_session(), limit)


def answered(test: SmokeResult) -> str:
    """`it answered "Paris." in 0.5 s (6 tokens/s)`."""
    said = f'answered "{test.answer.strip()}"' if test.task is Task.GENERATE else f"gave {test.answer}"
    return f"it {said} in {duration(test.seconds)} ({speed(test.tokens_per_second)})"


def _job_row(view: JobView) -> tuple[str, ...]:
    started = datetime.fromtimestamp(view.started_at, UTC).astimezone()
    took = duration(view.ended_at - view.started_at) if view.ended_at else ""
    return (view.id, view.state, view.model, f"{started:%Y-%m-%d %H:%M:%S}", took)

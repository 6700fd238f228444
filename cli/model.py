"""`ctl model`: the models and their jobs, shown and followed."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from activities.contract import JobResult, JobState, JobStatus
from cli import job_status, jobs
from cli.command_trace import run_traced
from cli.console import JsonFlag, out, print_json, print_table, run, say
from cli.progress import progress, steps_table
from cli.session import Session, open_session
from cli.views import MODEL_COLUMNS, JobView, model_row, model_views
from fleet.render import duration
from fleet.spec import JobKind, JobRequest
from fleet.state import FleetState

app = typer.Typer(help="Models: serve them, see them, remove them.", no_args_is_help=True)

NoWait = Annotated[bool, typer.Option("--no-wait", help="Start the job and return; `ctl model job ID` shows it.")]

JOB_COLUMNS = ("JOB", "STATE", "MODEL", "STARTED", "TOOK")


@app.command()
def remove(name: Annotated[str, typer.Argument(help="The model's name.")], no_wait: NoWait = False) -> None:
    """Take a model out of the catalog; its replicas are drained and stopped.

    Example: ctl model remove smollm2
    """
    run_traced("model remove", run_job(JobRequest(kind=JobKind.REMOVE, name=name), wait=not no_wait))


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


@app.command("job")
def show_job(
    job: Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `ctl model jobs` lists it.")],
    as_json: JsonFlag = False,
) -> None:
    """One job: its steps, how far they are, and why it failed.

    Example: ctl model job job/serve/smollm2/1
    """
    status = run(_status(job))
    if as_json:
        print_json(status)
        return
    out().print(steps_table(f"{status.job}: {job_status.words(status.state)}", status, time.time()))
    if status.failure is not None:
        ended = status.state if status.state in job_status.CUT_OFF else JobState.FAILED
        say(f"{job_status.words(ended)}: {job_status.told(status, status.failure)}")
    if status.replicas:
        say(f"replicas: {', '.join(status.replicas)}")


async def follow(session: Session, handle: jobs.JobHandle, title: str) -> JobResult:
    """Show a job until it ends, then its result. Raises JobFailedError."""
    with progress(title) as show:
        result = await jobs.follow(session, handle, show)
    say(result.sentence)
    if result.smoke_test is not None:
        test = result.smoke_test
        say(f'it answered "{test.answer.strip()}" in {duration(test.seconds)} ({test.tokens_per_second:.3g} tokens/s)')
    return result


async def run_job(request: JobRequest, *, wait: bool) -> None:
    """Start a job in ctl's cell, and follow it to its end."""
    session = await open_session()
    handle = await jobs.start(session, request.model_copy(update={"cell": session.cell}))
    if not wait:
        say(handle.id)
        return
    try:
        await follow(session, handle, handle.id)
    except asyncio.CancelledError:
        say(f"the job goes on: `ctl model job {handle.id}` shows it, `temporal workflow cancel -w {handle.id}` ends it")
        raise


async def _fleet() -> FleetState:
    return await (await open_session()).snapshot()


async def _recent(limit: int) -> tuple[JobView, ...]:
    return await jobs.recent(await open_session(), limit)


async def _status(job: str) -> JobStatus:
    session = await open_session()
    return await job_status.status(session, await job_status.find(session, job))


def _job_row(view: JobView) -> tuple[str, ...]:
    started = datetime.fromtimestamp(view.started_at, UTC).astimezone()
    took = duration(view.ended_at - view.started_at) if view.ended_at else ""
    return (view.id, view.state, view.model, f"{started:%Y-%m-%d %H:%M:%S}", took)

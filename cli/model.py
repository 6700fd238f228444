"""`ctl model`: serve, list, jobs, job, remove."""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from activities.contract import JobResult, JobStatus
from cli import jobs
from cli.console import JsonFlag, out, print_json, print_table, run, say
from cli.progress import progress, steps_table
from cli.session import Session, open_session
from cli.views import MODEL_COLUMNS, JobView, model_row, model_views
from fleet.render import duration
from fleet.spec import Engine, JobKind, JobRequest
from fleet.state import FleetState
from runtime.temporal import input_sentence

app = typer.Typer(help="Models: serve them, see them, remove them.", no_args_is_help=True)

NoWait = Annotated[bool, typer.Option("--no-wait", help="Start the job and return; `ctl model job ID` shows it.")]

JOB_COLUMNS = ("JOB", "STATE", "MODEL", "STARTED", "TOOK")


@app.command()
def serve(
    repo: Annotated[
        str, typer.Argument(help="org/name (@revision, :variant) on the hub, file:/path, a path, or https://…")
    ],
    name: Annotated[str | None, typer.Option(help="The name clients use; from the repo where it is not given.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="From the weights' format where it is not given.")] = None,
    replicas: Annotated[int, typer.Option(help="How many copies to run.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs for each replica; 0: run on the CPU.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="What one shard needs, such as 12GiB; estimated if absent.")
    ] = None,
    priority: Annotated[int, typer.Option(help="0 to 100; higher ones are placed first.")] = 50,
    context_length: Annotated[int | None, typer.Option(help="Tokens of one request, prompt and answer.")] = None,
    no_wait: NoWait = False,
) -> None:
    """Serve a model: look it up, mirror it, check it, place it, start it, try it.

    Example: ctl model serve ./SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2
    """
    given = {
        "repo": jobs.repo_argument(repo, Path.cwd()),
        "name": name,
        "engine": engine,
        "replicas": replicas,
        "gpus": gpus,
        "memory": memory,
        "priority": priority,
        "context_length": context_length,
    }
    run(_job(_request(JobKind.SERVE, given), wait=not no_wait))


@app.command()
def remove(name: Annotated[str, typer.Argument(help="The model's name.")], no_wait: NoWait = False) -> None:
    """Take a model out of the catalog; its replicas are drained and stopped.

    Example: ctl model remove smollm2
    """
    run(_job(_request(JobKind.REMOVE, {"name": name}), wait=not no_wait))


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
    status = run(_status(jobs.job_workflow_id(job)))
    if as_json:
        print_json(status)
        return
    out().print(steps_table(f"{status.job}: {status.state}", status, time.time()))
    if status.failure is not None:
        say(f"failed: {status.failure.sentence}")
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


async def _job(request: JobRequest, *, wait: bool) -> None:
    session = await open_session()
    handle = await jobs.start(session, request)
    if not wait:
        say(handle.id)
        return
    try:
        await follow(session, handle, handle.id)
    except asyncio.CancelledError:
        say(f"the job goes on: `ctl model job {handle.id}` shows it, `temporal workflow cancel -w {handle.id}` ends it")
        raise


def _request(kind: JobKind, given: Mapping[str, object]) -> JobRequest:
    try:
        return JobRequest.model_validate({"kind": kind, **given})
    except ValidationError as error:
        raise typer.BadParameter(input_sentence(error)) from error


async def _fleet() -> FleetState:
    return await (await open_session()).snapshot()


async def _recent(limit: int) -> tuple[JobView, ...]:
    return await jobs.recent(await open_session(), limit)


async def _status(job: str) -> JobStatus:
    return await jobs.status(await open_session(), job)


def _job_row(view: JobView) -> tuple[str, ...]:
    started = datetime.fromtimestamp(view.started_at, UTC).astimezone()
    took = duration(view.ended_at - view.started_at) if view.ended_at else ""
    return (view.id, view.state, view.model, f"{started:%Y-%m-%d %H:%M:%S}", took)

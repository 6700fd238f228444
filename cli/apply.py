"""`ctl apply`: make the catalog as a file of models says, by one job for each model that is not so."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from activities.contract import JobStatus, StepState
from cli import jobs
from cli.command_trace import run_traced
from cli.console import JsonFlag, note, out, print_json, say, table
from cli.errors import JobFailedError
from cli.models_file import Changes, compare, read_models
from cli.plans import FileOption, PruneFlag, Verbose, show_plan
from cli.progress import SIGNS, LineProgress, told
from cli.session import Session, open_session
from fleet.records import Record
from fleet.spec import JobKind, JobRequest

QUERIES_PER_S = 50.0
"""Of all jobs that are followed: each query is a task for the worker that runs them."""

COLUMNS = ("", "MODEL", "JOB", "STEP", "DETAIL")

Show = Callable[[str, JobStatus], None]


class Applied(Record):
    """`ctl apply --json`: a list of these, one for each model of the file and each that was removed."""

    model: str
    action: str
    """serve, remove, or none where the model is as the file says."""
    job: str
    """The job's id; empty where there is none."""
    state: str
    """done, failed, unchanged; with --no-wait started."""
    sentence: str
    """What the job came to, or why there is one."""


def apply(
    file: FileOption,
    prune: PruneFlag = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would do, as `ctl model plan`.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Start the jobs and return.")] = False,
    verbose: Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Make the catalog as a file says: new and changed models are served, with --prune others are removed.

    Example: ctl apply -f models.yaml --prune
    """
    if dry_run:
        show_plan(file, prune=prune, verbose=verbose, as_json=as_json)
        return
    done = run_traced("apply", _apply(file, prune=prune, wait=not no_wait, quiet=as_json))
    if as_json:
        print_json(done)
    if any(one.state == "failed" for one in done):
        raise typer.Exit(1)


async def _apply(file: Path, *, prune: bool, wait: bool, quiet: bool) -> tuple[Applied, ...]:
    session = await open_session()
    requests = read_models(file, session.cell)
    changes = compare(await session.state(), requests, prune=prune)
    tell = note if quiet else say
    if changes.none:
        tell(f"nothing to do: {summary_of_same(len(changes.same))}")
        return _unchanged(changes)
    if not wait:
        started = await start_all(session, changes)
        for one in started:
            tell(one.job)
        return (*started, *_unchanged(changes))
    with _progress(plain=quiet) as show:
        done = await apply_all(session, changes, show)
    for line in summary(done, len(changes.same)):
        tell(line)
    return (*done, *_unchanged(changes))


async def start_all(session: Session, changes: Changes) -> tuple[Applied, ...]:
    """Start every job and wait for none."""
    return tuple([_started(handle, request, why) for handle, request, why in await _start(session, changes)])


async def apply_all(session: Session, changes: Changes, show: Show) -> tuple[Applied, ...]:
    """Run every job, side by side, and tell how each ended. Being cancelled leaves the jobs alone."""
    started = await _start(session, changes)
    poll_s = max(jobs.POLL_S, len(started) / QUERIES_PER_S)
    silence = jobs.Silence(note, jobs.AWAY_ALL)

    async def one(handle: jobs.JobHandle, request: JobRequest) -> Applied:
        name = request.name or ""
        try:
            result = await jobs.follow(session, handle, lambda status: show(name, status), poll_s, silence)
        except JobFailedError as error:
            state, sentence = "failed", str(error)
        else:
            state, sentence = "done", result.sentence
        return Applied(model=name, action=request.kind, job=handle.id, state=state, sentence=sentence)

    try:
        return tuple(await asyncio.gather(*(one(handle, request) for handle, request, _ in started)))
    except asyncio.CancelledError:
        note("the jobs go on: `ctl model jobs` shows them")
        raise


async def _start(session: Session, changes: Changes) -> list[tuple[jobs.JobHandle, JobRequest, str]]:
    wanted = [(one.request, one.why) for one in changes.serve]
    wanted += [
        (JobRequest(kind=JobKind.REMOVE, cell=session.cell, name=name), "the file does not have it")
        for name in changes.remove
    ]
    return [(await jobs.start(session, request), request, why) for request, why in wanted]


def summary(done: tuple[Applied, ...], same: int) -> list[str]:
    """A line for each job that ended, the failed ones last, and one over all."""
    lines = [f"{one.model}: {one.sentence}" for one in sorted(done, key=lambda one: one.state == "failed")]
    kinds = [
        ("served", [one for one in done if one.state == "done" and one.action == JobKind.SERVE]),
        ("removed", [one for one in done if one.state == "done" and one.action == JobKind.REMOVE]),
        ("failed", [one for one in done if one.state == "failed"]),
    ]
    counts = [f"{len(found)} {word}" for word, found in kinds if found]
    if same:
        counts.append(f"{same} unchanged")
    return [*lines, f"{_count(len(done) + same, 'model')}: {', '.join(counts)}"]


def summary_of_same(count: int) -> str:
    """`3 models are as the file says`."""
    if count == 0:
        return "the file has no models, and --prune was not given or there is none to remove"
    return f"{_count(count, 'model')} {'is' if count == 1 else 'are'} as the file says"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _unchanged(changes: Changes) -> tuple[Applied, ...]:
    return tuple(
        Applied(model=name, action="none", job="", state="unchanged", sentence="it is as the file says")
        for name in changes.same
    )


def _started(handle: jobs.JobHandle, request: JobRequest, why: str) -> Applied:
    return Applied(model=request.name or "", action=request.kind, job=handle.id, state="started", sentence=why)


@contextmanager
def _progress(*, plain: bool) -> Iterator[Show]:
    """One line a model: live in a terminal, elsewhere one for each change."""
    console = out()
    if plain or not console.is_terminal:
        lines = LineProgress(note)
        yield lambda name, status: lines.show(status, f"{name}: ")
        return
    latest: dict[str, JobStatus] = {}
    with Live(console=console, refresh_per_second=8) as live:

        def show(name: str, status: JobStatus) -> None:
            latest[name] = status
            live.update(table(COLUMNS, [_row(model, job) for model, job in latest.items()]))

        yield show


def _row(name: str, status: JobStatus) -> tuple[str, ...]:
    reached = [step for step in status.steps if step.state is not StepState.PENDING]
    step = reached[-1] if reached else status.steps[0]
    return (SIGNS[step.state], name, status.job, step.name, told(step))

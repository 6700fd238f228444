"""`ctl model job`: one job shown, or cancelled."""

import asyncio
import time
from shlex import quote
from typing import Annotated, Any

import typer
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import CancelledError
from typer.core import TyperGroup

from activities.contract import JobResult, JobState, JobStatus
from cli import job_status
from cli.command_trace import run_traced
from cli.console import JsonFlag, out, print_json, run, say
from cli.errors import CtlError
from cli.progress import steps_table
from cli.session import open_session

CANCEL_WAIT_S = 60.0
"""A transfer stops within its heartbeat (5 s) and deletes its partial files; a worker that is away takes it later."""

JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `ctl model jobs` lists it.")]


class ShowByDefault(TyperGroup):
    """`job ID` is `job show ID`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(help="One job: `ctl model job ID` shows it.", cls=ShowByDefault, no_args_is_help=True)


@app.command("show")
def show_job(job: JobArgument, as_json: JsonFlag = False) -> None:
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
    if status.trace_id:
        say(f"trace: {status.trace_id} (`ctl trace {quote(status.job)}` draws it)")


@app.command("cancel")
def cancel_job(
    job: JobArgument,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Ask for it and return.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Stop a job's work and take back what it did: what served before goes on as it was.

    Example: ctl model job cancel job/serve/smollm2/1
    """
    status = run_traced("model job cancel", _cancelled(job, wait=not no_wait))
    if as_json:
        print_json(status)
    elif status.state is JobState.RUNNING:
        say(f"{status.job} is being cancelled: `ctl model job {quote(status.job)}` shows it")
    else:
        at = next((step.name for step in status.steps if step.state == "failed"), "")
        say(f"{status.job} is {job_status.words(status.state)}{f' at {at}' if at else ''}")


async def _status(job: str) -> JobStatus:
    session = await open_session()
    return await job_status.status(session, await job_status.find(session, job))


async def _cancelled(job: str, *, wait: bool) -> JobStatus:
    """Cancel a job that runs; one that was cancelled already is as it was asked for. Raises CtlError."""
    session = await open_session()
    found = await job_status.find(session, job)
    before = await job_status.described(session, found)
    if before in (JobState.DONE, JobState.FAILED, *job_status.CUT_OFF):
        raise CtlError(f"job {found} is over ({job_status.words(before)}): there is nothing to cancel")
    handle: job_status.JobHandle = session.client.get_workflow_handle(found, result_type=JobResult)
    if before is JobState.RUNNING:
        await handle.cancel()
    if not wait:
        return job_status.blank(found)
    try:
        await asyncio.wait_for(handle.result(), CANCEL_WAIT_S)
    except TimeoutError as error:
        raise CtlError(
            f"{found} was asked to end and has not within {CANCEL_WAIT_S:g} s: it will when its worker is back; "
            f"`ctl status` shows whether it runs"
        ) from error
    except WorkflowFailureError as error:
        if not isinstance(error.cause, CancelledError):
            raise
    return await job_status.status(session, found)

"""`ctl trace`: what happened in a job or a replica's start, where the time went, and why it is not serving."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import httpx
import typer

from activities.contract import StepState
from cli import job_status
from cli.console import JsonFlag, note, out, print_json, run, say
from cli.errors import CtlError
from cli.home import Home, find_home
from cli.session import open_session
from cli.span_tree import TraceNode, trace_lines, tree
from cli.trace_page import page
from cli.trace_sources import Files, TraceSource, client, collect, store_at
from cli.waterfall import Limits, print_waterfall
from fleet.trace_ids import is_trace_id, trace_id_of
from runtime.config import TraceStoreConfig
from runtime.temporal import UnreachableError


@dataclass(frozen=True)
class Found:
    """What the operator named."""

    trace_id: str
    end: str = ""
    """Of a job that has not ended, or whose own span never will: a sentence."""


def trace(
    subject: Annotated[str, typer.Argument(metavar="ID", help="A job's or a replica's id, or a trace id.")],
    as_tree: Annotated[bool, typer.Option("--tree", help="A tree with attributes instead of bars.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page of its own, which needs no network.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show N levels beneath the root.")] = None,
    shortest: Annotated[
        float, typer.Option("--min", min=0, metavar="MS", help="Leave out what took less, unless it failed.")
    ] = 0.0,
    jaeger: Annotated[str | None, typer.Option(metavar="URL", help="Read from Jaeger instead of the files.")] = None,
    tempo: Annotated[str | None, typer.Option(metavar="URL", help="Read from Tempo instead of the files.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw the spans of a job or of a replica's start: times, errors and their causes, and where the time went.

    Example: ctl trace job/serve/smollm2/1 --html start.html
    """
    if jaeger and tempo:
        raise typer.BadParameter("--jaeger and --tempo: name one of them")
    home = find_home()
    asked = TraceStoreConfig(jaeger=jaeger or "", tempo=tempo or "") if jaeger or tempo else _configured(home)
    found, roots = run(_read(home, asked, subject))
    if as_json:
        print_json(roots)
    elif html is not None:
        html.write_text(page(subject, roots), encoding="utf-8")
        say(f"wrote {html}: open it in a browser")
    elif as_tree:
        for line in trace_lines(roots):
            say(line)
    else:
        print_waterfall(out(), roots, Limits(depth, shortest / 1000))
    if found.end:
        note(found.end)


async def read_trace(home: Home, trace_id: str) -> tuple[TraceNode, ...]:
    """One trace out of the home's files."""
    return tree(await collect(Files(home.traces), trace_id), trace_id)


async def _read(home: Home, query: TraceStoreConfig, subject: str) -> tuple[Found, tuple[TraceNode, ...]]:
    if not (query.jaeger or query.tempo):
        return await _read_from(Files(home.traces), subject)
    http = client(query)
    try:
        return await _read_from(store_at(query, http), subject)
    except httpx.InvalidURL as error:
        raise CtlError(f"{query.jaeger or query.tempo} is no address: {error}") from error
    finally:
        await http.aclose()


async def _read_from(source: TraceSource, subject: str) -> tuple[Found, tuple[TraceNode, ...]]:
    found = await find_trace(source, subject)
    roots = tree(await collect(source, found.trace_id), found.trace_id)
    if not roots:
        why = found.end or "it has not ended yet, or its spans go elsewhere"
        raise CtlError(f"no span of {subject} is in {source.place}: {why}")
    if isinstance(source, Files) and source.broken_lines:
        note(f"{source.broken_lines} lines in {source.place} are no spans and were left out")
    return found, roots


async def find_trace(source: TraceSource, subject: str) -> Found:
    """The trace of what the operator named. Raises CtlError."""
    if is_trace_id(subject.lower()):
        return Found(subject.lower())
    problem = "tracing was off when it ran (see server.yaml)"
    try:
        told = await _ask(subject)
    except (UnreachableError, CtlError) as error:
        told, problem = Found(""), str(error)  # the spans themselves may still say it
    found = told.trace_id
    for attribute, value in (
        ("llmgw.replica", subject),
        ("llmgw.job", subject),
        ("llmgw.job", job_status.with_prefix(subject)),
    ):
        found = found or await source.trace_of(attribute, value)
    if not found:
        raise CtlError(f"no span in {source.place} belongs to {subject}, and {told.end or problem}")
    return replace(told, trace_id=found)


def _configured(home: Home) -> TraceStoreConfig:
    return home.server().trace_store if home.server_yaml.exists() else TraceStoreConfig()


async def _ask(subject: str) -> Found:
    session = await open_session()
    try:
        replica = (await session.state()).replicas.get(subject)
    except CtlError:
        replica = None  # a job can answer where the fleet is gone
    if replica is not None:
        return Found(trace_id_of(replica.trace))
    status = await job_status.status(session, await job_status.find(session, subject))
    trace_id = trace_id_of(status.trace)
    if status.state in job_status.CUT_OFF:
        why = f": {status.failure.detail}" if status.failure is not None else ""
        return Found(
            trace_id, f"{status.job} is over ({job_status.words(status.state)}){why}; its own span never ended"
        )
    running = next((step for step in status.steps if step.state is StepState.RUNNING), None)
    if running is None:
        return Found(trace_id)
    detail = f": {running.detail}" if running.detail else ""
    return Found(trace_id, f"{status.job} is still at {running.name}{detail}")

"""`ctl trace`: what happened in a job or a replica's start, as a tree with times."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from cli import job_status
from cli.console import JsonFlag, note, print_json, run, say
from cli.errors import CtlError
from cli.home import Home, find_home
from cli.session import open_session
from cli.spans import SpanStore, is_trace_id, trace_id_of, trace_lines, tree
from runtime.temporal import UnreachableError


@dataclass(frozen=True)
class Found:
    """What the operator named."""

    trace_id: str
    end: str = ""
    """Of a job that was cut off, so that its own span never ended: a sentence."""


def trace(
    subject: Annotated[str, typer.Argument(metavar="ID", help="A job's or a replica's id, or a trace id.")],
    as_json: JsonFlag = False,
) -> None:
    """The spans of a job or of a replica's start, as a tree with times, errors and their causes.

    Example: ctl trace job/serve/smollm2/1
    """
    home = find_home()
    store = read_spans(home)
    found = find_trace(home, store, subject)
    roots = tree(store, found.trace_id)
    if not roots:
        why = found.end or "it has not ended yet, or its spans go elsewhere"
        raise CtlError(f"no span of {subject} is in {home.traces}: {why}")
    if store.broken_lines:
        note(f"{store.broken_lines} lines in {home.traces} are no spans and were left out")
    if as_json:
        print_json(roots)
    else:
        for line in trace_lines(roots):
            say(line)
    if found.end:
        note(found.end)


def read_spans(home: Home) -> SpanStore:
    """All spans in the home's files."""
    store = SpanStore()
    for file in sorted(home.traces.glob("*.jsonl")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            store.read(lines)
    return store


def find_trace(home: Home, store: SpanStore, subject: str) -> Found:
    """The trace of what the operator named. Raises CtlError."""
    if is_trace_id(subject.lower()):
        return Found(subject.lower())
    problem = "tracing was off when it ran (see server.yaml)"
    try:
        told = run(_ask(subject))
    except (UnreachableError, CtlError) as error:
        told, problem = Found(""), str(error)  # the spans themselves may still say it
    span = (
        store.latest("llmgw.replica", subject)
        or store.latest("llmgw.job", subject)
        or store.latest("llmgw.job", job_status.with_prefix(subject))
    )
    found = told.trace_id or (span.trace_id if span is not None else "")
    if not found:
        raise CtlError(f"no span in {home.traces} belongs to {subject}, and {told.end or problem}")
    return replace(told, trace_id=found)


async def _ask(subject: str) -> Found:
    session = await open_session()
    try:
        replica = (await session.snapshot()).replicas.get(subject)
    except CtlError:
        replica = None  # a job can answer where the fleet is gone
    if replica is not None:
        return Found(trace_id_of(replica.trace))
    status = await job_status.status(session, await job_status.find(session, subject))
    cut_off = status.state in job_status.CUT_OFF
    why = f": {status.failure.detail}" if status.failure is not None else ""
    end = f"{status.job} is over ({job_status.words(status.state)}){why}; its own span never ended" if cut_off else ""
    return Found(trace_id_of(status.trace), end)

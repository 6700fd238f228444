"""`ctl trace`: what happened in a job or a replica's start, as a tree with times."""

from typing import Annotated

import typer

from cli import jobs
from cli.console import JsonFlag, note, print_json, run, say
from cli.errors import CtlError
from cli.home import Home, find_home
from cli.session import open_session
from cli.spans import SpanStore, is_trace_id, trace_id_of, trace_lines, tree
from runtime.temporal import UnreachableError


def trace(
    subject: Annotated[str, typer.Argument(metavar="ID", help="A job's or a replica's id, or a trace id.")],
    as_json: JsonFlag = False,
) -> None:
    """The spans of a job or of a replica's start, as a tree with times, errors and their causes.

    Example: ctl trace job/serve/smollm2/1
    """
    home = find_home()
    store = read_spans(home)
    roots = tree(store, find_trace(home, store, subject))
    if not roots:
        raise CtlError(f"no span of {subject} is in {home.traces}: it has not ended yet, or its spans go elsewhere")
    if store.broken_lines:
        note(f"{store.broken_lines} lines in {home.traces} are no spans and were left out")
    if as_json:
        print_json(roots)
    else:
        for line in trace_lines(roots):
            say(line)


def read_spans(home: Home) -> SpanStore:
    """All spans in the home's files."""
    store = SpanStore()
    for file in sorted(home.traces.glob("*.jsonl")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            store.read(lines)
    return store


def find_trace(home: Home, store: SpanStore, subject: str) -> str:
    """The trace id of what the operator named. Raises CtlError."""
    if is_trace_id(subject.lower()):
        return subject.lower()
    problem = "tracing was off when it ran (see server.yaml)"
    try:
        told = run(_ask(subject))
    except (UnreachableError, CtlError) as error:
        told, problem = "", str(error)  # the spans themselves may still say it
    job = jobs.job_workflow_id(subject)
    span = store.latest("llmgw.replica", subject) or store.latest("llmgw.job", job)
    found = trace_id_of(told) or (span.trace_id if span is not None else "")
    if not found:
        raise CtlError(f"no span in {home.traces} belongs to {subject}, and {problem}")
    return found


async def _ask(subject: str) -> str:
    session = await open_session()
    replica = (await session.snapshot()).replicas.get(subject)
    if replica is not None:
        return replica.trace
    return (await jobs.status(session, jobs.job_workflow_id(subject))).trace

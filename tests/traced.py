"""A traced system for tests: real processes, the stand-in for llama.cpp as engine, and the spans of its files."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowFailureError, WorkflowHandle

from activities.contract import JobResult
from cli.span_tree import TraceNode, trace_lines, tree
from cli.spans import Span, SpanStore
from cli.wall_time import covered, itself, walk
from fleet.trace_ids import trace_id_of
from tests import sglang_env
from tests.ggufs import gguf
from tests.system import System, system
from tests.waiting import POLL_S, until

STAND_IN = sglang_env.STAND_IN / "llamacpp"
WHOLE = 0.99
"""Of the time from the command to the first token, or to the failure: the share whose name is known."""
EXPORTED_S = 30.0
"""Exporters write with a delay of a fifth of a second; a busy machine takes longer."""
LATE_S = 5.0
"""As much of a trace as there is by then is taken for all of it."""


class Traced:
    """One system and what its trace files hold."""

    def __init__(self, running: System) -> None:
        self.system = running
        self.model = running.home / "tiny.gguf"
        self.model.write_bytes(gguf())
        self.python = sglang_env.make(running.home / "engine", STAND_IN)

    def start_agent(self, node: str, **settings: Any) -> None:
        engines = {"llamacpp": {"bin": str(self.python)}}
        self.system.start_agent(node, **{"engines": engines, "memory": "1GiB", **settings})

    async def serve(self, name: str, *, how: str = "", **request: Any) -> WorkflowHandle[Any, JobResult]:
        """A job; `how` tells its engine how to fail."""
        args = {"args": [f"stand_in={how}"]} if how else {}
        return await self.system.job({"repo": f"file:{self.model}", "name": name, "concurrency": 1, **args, **request})

    async def remove(self, name: str) -> None:
        await (await self.system.job({"kind": "remove", "name": name})).result()

    def store(self) -> SpanStore:
        return spans_in(self.system.home / "traces")

    async def named(self, name: str, count: int = 1, **attributes: object) -> list[Span]:
        """The spans of this name with these attributes (`__` for a dot), once there are that many; the oldest first."""
        wanted = {f"llmgw.{key.replace('__', '.')}": value for key, value in attributes.items()}

        def there() -> list[Span]:
            found = [
                span
                for span in self.store().spans.values()
                if span.name == name and all(span.attributes.get(key) == value for key, value in wanted.items())
            ]
            return sorted(found, key=lambda span: span.start_ns) if len(found) >= count else []

        return await until(there, EXPORTED_S)

    async def tree_of(self, job: WorkflowHandle[Any, Any]) -> TraceNode:
        """A job's whole trace, once its root is written."""
        return await tree_of(self.system, job)

    def raw(self) -> Iterator[dict[str, Any]]:
        """Every span of every export, as written: also one that was exported twice."""
        for file in (self.system.home / "traces").glob("*.jsonl"):
            for line in file.read_text().splitlines():
                for resource in json.loads(line)["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        yield from scope["spans"]


async def tree_of(running: System, job: WorkflowHandle[Any, Any]) -> TraceNode:
    """A job's whole trace, once its root is written, and the agents' part, which may come later."""
    return await tree_named(running, (await running.status(job)).trace)


async def tree_named(running: System, traceparent: str) -> TraceNode:
    """The same of whatever belongs to a trace."""
    trace_id = trace_id_of(traceparent)

    def written() -> TraceNode | None:
        roots = tree(spans_in(running.home / "traces"), trace_id)
        return roots[0] if len(roots) == 1 and not roots[0].span.parent_id else None

    root = await until(written, EXPORTED_S)
    deadline = time.monotonic() + LATE_S
    while unnamed(root) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        root = await until(written, EXPORTED_S)
    return root


def spans_in(directory: Path) -> SpanStore:
    """All that the processes of one home have written."""
    found = SpanStore()
    for file in directory.glob("*.jsonl"):
        found.read(file.read_text().splitlines())
    return found


async def failure_of(job: WorkflowHandle[Any, Any]) -> str:
    """Wait until a job has failed; with what."""
    try:
        result = await job.result()
    except WorkflowFailureError as error:
        return str(error.cause)
    raise AssertionError(f"it did not fail: {result}")


def find(node: TraceNode, name: str) -> list[TraceNode]:
    """All spans of a name in a tree."""
    below = [found for child in node.children for found in find(child, name)]
    return [node, *below] if node.span.name == name else below


def assert_whole(root: TraceNode) -> None:
    """Leaves cover the way to the first token, or to the failure."""
    assert unnamed(root) == ""


def unnamed(root: TraceNode) -> str:
    """Which spans leave gaps; empty where too little is left to matter."""
    tokens = [event.time_ns for node in walk((root,)) for event in node.span.events if event.name == "first token"]
    share = covered((root,), (root.span.start_ns, tokens[0] if tokens else root.span.end_ns))
    if share >= WHOLE:
        return ""
    lone = [(node.span.name, (end - start) / 1e6) for node in walk((root,)) for start, end in itself(node)]
    told = [f"in {name} itself: {gap:.1f} ms" for name, gap in lone if gap >= 1]
    return "\n".join([f"{share:.4f}", *told, *trace_lines((root,))])


@contextlib.asynccontextmanager
async def traced(home: Path, *, agent: bool = True, **server: Any) -> AsyncIterator[Traced]:
    """Worker and, by default, the agent n1; `server` are settings of server.yaml."""
    async with system(home) as running:
        made = Traced(running)
        running.start_worker(**server)
        if agent:
            made.start_agent("n1")
            await running.ready("n1")
        yield made

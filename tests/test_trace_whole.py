"""Where the time went is known: leaves cover the way to the first token, or to the failure, whatever it is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from activities.contract import StepState
from activities.node_contract import StartShard
from cli.span_tree import TraceNode, trace_lines
from fleet.reasons import Reason
from tests.fleets import GIB
from tests.ggufs import gguf
from tests.light_node import LightNode
from tests.stub_hub import Fault, stub_hub
from tests.traced import Traced, assert_whole, find, traced
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

AT_ONCE = 3
BIG = 5 * GIB
"""Fits once on the node that is there; what needs more fits only on the one that will be lost."""


@dataclass(frozen=True)
class Case:
    """A job, how it is to end, and what its trace must name."""

    start: Callable[[Traced], Awaitable[WorkflowHandle[Any, Any]]]
    reason: Reason | None = None
    names: tuple[str, ...] = ()


async def _huge(running: Traced) -> WorkflowHandle[Any, Any]:
    huge = running.system.home / "huge.gguf"
    huge.write_bytes(gguf())
    with huge.open("r+b") as file:
        file.truncate(8 * 1024 * GIB)  # sparse: it takes no space here, and more than there is in a mirror
    return await running.system.job({"repo": f"file:{huge}", "name": "huge"})


async def _text(running: Traced) -> WorkflowHandle[Any, Any]:
    text = running.system.home / "text.gguf"
    text.write_text("This is no model.")
    return await running.system.job({"repo": f"file:{text}", "name": "text"})


async def _second(running: Traced) -> WorkflowHandle[Any, Any]:
    first = await running.serve("twice", how="loading", start_deadline_s=2)

    async def has_its_turn() -> bool:
        return (await running.system.status(first)).steps[4].state is StepState.RUNNING

    await until(has_its_turn, 60.0)
    return await running.serve("twice")


async def _no_room(running: Traced) -> WorkflowHandle[Any, Any]:
    await (await running.serve("roomy", memory=BIG)).result()
    return await running.serve("roomless", memory=BIG, room_deadline_s=0.5)


async def _lost(running: Traced) -> WorkflowHandle[Any, Any]:
    begun = asyncio.Event()

    async def never(request: StartShard) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with LightNode(running.system.client, "n2", memory=16 * GIB, start=never) as node:
        await node.join()
        job = await running.serve("lost", memory=2 * BIG, room_deadline_s=0.5)
        await asyncio.wait_for(begun.wait(), 60.0)
    return job


CASES = {
    "served": Case(lambda running: running.serve("fine"), names=("wait for pass", "wait for engine", "smoke test")),
    "no such file": Case(
        lambda running: running.system.job({"repo": "file:/no/such.gguf", "name": "a"}), Reason.REPO_NOT_FOUND
    ),
    "gated": Case(
        lambda running: running.system.job({"repo": "hf:org/name@closed", "name": "b"}), Reason.REPO_FORBIDDEN
    ),
    "no model": Case(_text, Reason.WEIGHTS_UNREADABLE, ("check",)),
    "disk full": Case(_huge, Reason.DISK_FULL),
    "does not fit": Case(lambda running: running.serve("giant", memory=1000 * GIB), Reason.DOES_NOT_FIT),
    "no room": Case(_no_room, Reason.MEMORY, ("wait for room",)),
    "bad flag": Case(
        lambda running: running.serve("flag", args=["no_such_setting=1"]), Reason.BAD_FLAG, ("launch engine",)
    ),
    "engine out of memory": Case(
        lambda running: running.serve("oom", how="oom"), Reason.GPU_OUT_OF_MEMORY, ("backoff", "wait for engine")
    ),
    "never ready": Case(lambda running: running.serve("never", how="loading", start_deadline_s=1), Reason.NEVER_READY),
    "engine killed while starting": Case(lambda running: running.serve("killed", how="killed"), Reason.EXITED),
    "smoke test fails": Case(lambda running: running.serve("mute", how="mute"), Reason.SMOKE_TEST_FAILED),
    "waits for its turn": Case(_second, names=("wait for turn", "look up")),
    "node lost during start": Case(_lost, Reason.MEMORY, ("wait for node", "wait for room")),
}


@pytest.fixture(scope="module")
async def trees(tmp_path_factory: pytest.TempPathFactory, real_engine: None) -> AsyncIterator[dict[str, TraceNode]]:
    """The trace of each case; a few run at once, as a busy machine makes gaps where nothing is waited for."""
    gated = Fault("api", 1000, status=403, headers={"X-Error-Code": "GatedRepo"}, path="/closed")
    restart = {"attempts": 2, "base_s": 0.5}
    with stub_hub({"model.gguf": gguf()}, faults=[gated]) as hub:
        async with traced(
            tmp_path_factory.mktemp("whole"),
            agent=False,
            fleet={"restart": restart},
            hub={"endpoint": hub.url},
        ) as running:
            running.start_agent("n1", memory="7GiB")
            await running.system.ready("n1")

            few = asyncio.Semaphore(AT_ONCE)

            async def run(case: Case) -> TraceNode:
                async with few:
                    job = await case.start(running)
                    with contextlib.suppress(Exception):
                        await job.result()
                    return await running.tree_of(job)

            *others, last = CASES.values()
            done = await asyncio.gather(*(run(case) for case in others))
            done.append(await run(last))  # a second node would be in the others' way
            yield dict(zip(CASES, done, strict=True))


@pytest.mark.parametrize("name", CASES)
async def test_leaves_cover_the_way_to_the_first_token_or_the_failure(trees: dict[str, TraceNode], name: str) -> None:
    case, root = CASES[name], trees[name]
    said = "\n".join(trace_lines((root,)))
    assert root.span.attributes.get("llmgw.reason") == (case.reason.value if case.reason else None), said
    assert_whole(root)
    for wanted in case.names:
        assert find(root, wanted), said


async def test_the_wait_of_a_job_for_its_worker_is_known(tmp_path: Any) -> None:
    async with traced(tmp_path) as running:
        running.system.kill("worker")
        job = await running.system.job({"repo": "file:/no/such.gguf", "name": "late"})
        await asyncio.sleep(0.5)
        running.system.start_worker()
        with contextlib.suppress(Exception):
            await job.result()
        root = await running.tree_of(job)
        (wait, *_) = find(root, "wait for worker")
        assert wait.span.start_ns == root.span.start_ns
        assert wait.span.seconds > 0.5
        assert_whole(root)

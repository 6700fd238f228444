"""A gang with real agents, as processes, and SGLang's stand-in: served, adopted, broken and removed as one."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agent.layout import Layout
from agent.ledger import Entry, Ledger
from cli.span_tree import TraceNode
from tests import sglang_env
from tests.system import System, system
from tests.traced import assert_whole, find, tree_of
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("real_engine"), pytest.mark.timeout(300)]

ADDRESSES = {"n1": "127.0.0.1", "n2": "127.0.0.2"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sglang_env.make(tmp_path_factory.mktemp("sglang"))


@pytest.fixture
async def running(tmp_path: Path, python: Path) -> AsyncIterator[System]:
    async with system(tmp_path) as made:
        made.start_worker()
        for node in ADDRESSES:
            start_agent(made, node, python)
        await made.ready(*ADDRESSES)
        yield made


def start_agent(running: System, node: str, python: Path) -> None:
    settings: dict[str, Any] = {"engines": {"sglang": {"bin": str(python)}}, "address": ADDRESSES[node]}
    running.start_agent(node, lease={"heartbeat_timeout_s": 2, "grace_s": 300}, **settings)


def held(running: System, node: str) -> tuple[Entry, ...]:
    return Ledger(Layout(running.home / node).ledger).entries()


def entry(running: System, node: str) -> Entry:
    (found,) = held(running, node)
    return found


def process(found: Entry) -> psutil.Process:
    assert found.process is not None
    return psutil.Process(found.process.engine.pid)


def assert_traced(root: TraceNode) -> None:
    """Both nodes are in the trace of the start, and the time is accounted for."""
    assert_whole(root)
    (start,) = find(root, "start replica")
    for name in ("send prepare", "prepare shard", "send start", "start shard", "rendezvous", "wait for engine"):
        assert len(find(start, name)) == len(ADDRESSES), name
    assert {node.span.attributes["llmgw.node"] for node in find(start, "start shard")} == set(ADDRESSES)
    (reserved,) = find(start, "reserve port")
    (checked,) = find(start, "check port")
    assert checked.span.attributes["llmgw.port"] == reserved.span.attributes["llmgw.port"]
    assert checked.span.attributes["llmgw.node"] != reserved.span.attributes["llmgw.node"]
    meetings = {node.span.attributes["llmgw.rendezvous"] for node in find(start, "rendezvous")}
    assert [meeting.rpartition(":")[2] for meeting in meetings] == [str(reserved.span.attributes["llmgw.port"])]


async def test_served_adopted_broken_and_removed_as_one(running: System, python: Path, tmp_path: Path) -> None:
    request = sglang_env.over_two_nodes(tmp_path)
    job = await running.job(request)
    assert (await job.result()).smoke_test is not None
    assert_traced(await tree_of(running, job))
    first = await running.serving()
    assert set(first.nodes) == set(ADDRESSES)
    head, other = first.nodes
    assert first.endpoint == entry(running, head).endpoint
    for rank, node in enumerate(first.nodes):
        command = process(entry(running, node)).cmdline()
        assert command[command.index("--node-rank") + 1] == str(rank)
        assert command[command.index("--dist-init-addr") + 1].startswith(f"{ADDRESSES[head]}:")
        assert command[command.index("--tensor-parallel-size") + 1] == "2"

    before = process(entry(running, other)).pid
    running.kill(other)
    start_agent(running, other, python)
    await until(lambda: "joined the fleet: 1 running, 1 claimed" in running.log(other), 60)
    assert process(entry(running, other)).pid == before
    assert (await running.state()).replicas["tiny-0"].generation == first.generation

    process(entry(running, other)).send_signal(signal.SIGKILL)
    second = await running.serving(after=first.generation)
    assert second.generation == first.generation + 1
    assert [one.shard.generation for one in (entry(running, node) for node in ADDRESSES)] == [second.generation] * 2
    async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = await http.post(f"{second.endpoint}/v1/chat/completions", json=body)
    assert answer.is_success

    await running.fleet.execute_update("scale", {"name": "tiny", "replicas": 0})
    await until(lambda: running.engines() == [], 60)
    await until(lambda: [held(running, node) for node in ADDRESSES] == [(), ()], 60)

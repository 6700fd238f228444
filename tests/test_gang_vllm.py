"""One vLLM over two machines, for real: two network namespaces, two agents, one replica, one answer through a gateway.

Tensor parallel on CPUs, one core for each shard. A start takes half a minute of both cores, so there are two in all.
"""

import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from agent.layout import Layout
from agent.ledger import Entry, Ledger
from fleet.state import ReplicaState
from tests import namespaces, tiny_checkpoint
from tests.namespaces import Network
from tests.system import System, system
from tests.test_traces import named
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("real_vllm", "real_engine"), pytest.mark.timeout(1200)]

START_S = 400.0
"""A start on two cores that others use too."""


network = pytest.fixture(scope="module")(namespaces.pair)


@pytest.fixture
async def running(tmp_path: Path, network: Network, real_vllm: Path) -> AsyncIterator[System]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two shards of vLLM need two cores")
    async with system(tmp_path) as made, namespaces.reached_at(network.host, made.address) as address:
        made.start_worker()
        for number, place in enumerate(network.namespaces):
            made.start_agent(
                f"n{number + 1}",
                within=place.within,
                variables={"VLLM_CPU_OMP_THREADS_BIND": str(cores[number]), "TEMPORAL_ADDRESS": address},
                address=place.address,
                engines={"vllm": {"bin": str(real_vllm)}},
            )
        await made.ready("n1", "n2")
        yield made


async def test_two_shards_answer_as_one_and_restart_as_one(running: System, network: Network, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint.make(tmp_path / "checkpoint")
    request = {
        "repo": f"file:{checkpoint}",
        "name": "tiny",
        "nodes": 2,
        "context_length": 512,
        "concurrency": 2,
        "start_deadline_s": START_S,
    }
    result = await (await running.job(request)).result()
    assert result.smoke_test is not None
    first = (await running.state()).replicas["tiny-0"]
    assert first.state is ReplicaState.SERVING
    assert set(first.nodes) == {"n1", "n2"}
    head = network.namespaces[int(first.nodes[0][1]) - 1]
    assert first.endpoint.startswith(f"http://{head.address}:")
    met = await named(running, "rendezvous", 2)
    assert {span.attributes["llmgw.nodes"] for span in met} == {",".join(first.nodes)}
    assert all(str(span.attributes["llmgw.rendezvous"]).startswith(f"{head.address}:") for span in met)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running.start_gateway(port)

    async def answered() -> str:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "temperature": 0}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            try:
                answer = await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
            except httpx.TransportError:
                return ""  # it starts
        return str(answer.json()["choices"][0]["message"]["content"]) if answer.is_success else ""

    said = await until(answered, 90)
    assert len(said) == 20

    worker = engine(running, first.nodes[1])
    worker.send_signal(signal.SIGKILL)

    async def again() -> bool:
        found = (await running.state()).replicas["tiny-0"]
        return found.state is ReplicaState.SERVING and found.generation > first.generation

    await until(again, START_S)
    second = (await running.state()).replicas["tiny-0"]
    assert second.generation == first.generation + 1, "once, and as a whole"
    assert len(second.failures) == 1
    assert await until(answered, 90) == said

    await running.fleet.execute_update("scale", {"name": "tiny", "replicas": 0})
    await until(lambda: running.engines() == [], 60)
    await until(lambda: [held(running, node) for node in ("n1", "n2")] == [(), ()], 60)


def held(running: System, node: str) -> tuple[Entry, ...]:
    return Ledger(Layout(running.home / node).ledger).entries()


def engine(running: System, node: str) -> psutil.Process:
    """The main process of the shard on this node."""
    (entry,) = held(running, node)
    assert entry.process is not None
    return psutil.Process(entry.process.engine.pid)

"""Requests that vLLM's own gauges do not show: what an agent does by the count made at its door."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from activities.node_contract import DrainedShard, DrainShard, ShardHealth, ShardRef
from agent.engines.adapter import Launch, gauge_sum
from agent.engines.vllm import TOLD, Vllm
from agent.probe import Probe
from fleet.spec import Engine
from tests import streams
from tests.fake_engines.acts import start
from tests.fake_engines.node import FakeNode
from tests.waiting import until

# -- what vLLM says of itself -----------------------------------------------------------------------------------------

# As vLLM 0.32.0 answered with its worker stopped after the first of forty requests had a token.
FROZEN = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 5.142181313311234e-05
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1368.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1368.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 77506.0
# HELP llmgw_requests_in_flight Requests that were read and wait for their answer or for the rest of it.
# TYPE llmgw_requests_in_flight gauge
llmgw_requests_in_flight 40.0
# HELP llmgw_oldest_answered_total Answers that were finished, also a refusal, to the request that had waited longest.
# TYPE llmgw_oldest_answered_total counter
llmgw_oldest_answered_total 3.0
"""


@pytest.mark.parametrize(
    ("metrics", "count"),
    [
        (FROZEN, 40),  # its gauges are of the last step, and more has come
        (FROZEN.replace("} 1.0", "} 41.0"), 41),  # one request is several in there
        (FROZEN.partition("# HELP llmgw")[0], 1),  # started by an agent that did not have it counted
        ("llmgw_requests_in_flight 0.0\n", 0),
        (
            (
                'vllm:num_requests_running{engine="0",model_name="a b"} 1.0\n'
                'vllm:num_requests_waiting{engine="0",model_name="a b"} 2.0\n'
                'vllm:num_requests_waiting_by_reason{reason="x"} 7.0\n'
            ),
            3,
        ),
        ("", None),
    ],
)
def test_the_greater_count_is_right(metrics: str, count: int | None) -> None:
    assert Vllm().in_flight(metrics) == count


def test_what_comes_in_is_no_progress_of_its_core() -> None:
    progress = Vllm().progress
    assert len(progress(FROZEN)) == 7
    assert progress(FROZEN) == progress(FROZEN.replace("in_flight 40", "in_flight 41"))
    assert progress(FROZEN) != progress(FROZEN.replace("1368", "1387"))


# -- an agent, and a core that hangs ----------------------------------------------------------------------------------

PROGRAM = Path(__file__).parent / "fake_engines" / "vllm_server.py"
HUNG_S = 1.0
NOT_TAKEN = """
import socket, sys
body = sys.argv[2].encode()
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: e\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
client.sendall(head.encode() + body)
print(flush=True)
input()
"""
"""A client that asks and takes nothing of the answer, in a process of its own: an agent's are not looked at."""


@dataclass(frozen=True)
class StandIn(Vllm):
    """All of vLLM's adapter, in front of the stand-in."""

    engine: Engine = Engine.LLAMACPP
    module: str = "json"

    def command(self, python: Path, launch: Launch) -> list[str]:
        return [str(python), str(PROGRAM), *super().command(python, launch)[3:]]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe, StandIn(), unhealthy_after_s=0.3, hung_after_s=HUNG_S)
        yield made
        await made.close()


async def freeze(endpoint: str, how: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        (await http.post(f"{endpoint}/freeze/{how}")).raise_for_status()


async def seen(endpoint: str) -> tuple[int | None, int | None]:
    """Requests by vLLM's gauges alone, and as an agent counts them."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{endpoint}/metrics")).text
    return gauge_sum(text, TOLD), StandIn().in_flight(text)


async def come_to(endpoint: str, wanted: tuple[int, int]) -> None:
    async def there() -> bool:
        return await seen(endpoint) == wanted

    await until(there)


async def drain(node: FakeNode, deadline_s: float) -> DrainedShard:
    request = DrainShard(shard=ShardRef(replica="tiny-0", generation=1), deadline_s=deadline_s)
    return await ActivityEnvironment().run(node.shards.drain_shard, request)


async def test_a_core_that_hung_with_nothing_to_do_is_found_by_whoever_waits(node: FakeNode) -> None:
    endpoint = (await start(node)).endpoint
    await freeze(endpoint, 1)
    await asyncio.sleep(2 * HUNG_S)  # time must pass here: with nothing to do, nothing shows
    assert node.changes == []
    asked, ended = streams.begin(endpoint, 3, 5)
    await come_to(endpoint, (0, 3))
    await until(lambda: node.changes, 20)
    assert node.changes[0].failure.detail.endswith("with 3 requests in flight")
    assert await seen(endpoint) == (0, 3)
    await freeze(endpoint, 0)
    await ended
    assert all(one.whole for one in asked)
    await come_to(endpoint, (0, 0))


async def test_it_is_found_too_when_none_waits_that_long(node: FakeNode) -> None:
    endpoint = (await start(node)).endpoint
    await freeze(endpoint, 1)
    body = {"model": "tiny", "messages": [], "max_tokens": 5, "stream": True}
    async with httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(30, read=0.75 * HUNG_S)) as http:
        for _ in range(30):
            with pytest.raises(httpx.ReadTimeout):
                await http.post(f"{endpoint}/v1/chat/completions", json=body)
            await come_to(endpoint, (0, 0))
            if node.changes:
                break
    assert [change.failure.detail.partition(" for ")[0] for change in node.changes] == [
        "hangs: /health is fine, but nothing moved"
    ]


async def refused_until(endpoint: str, over: Callable[[], bool]) -> None:
    """Ask for what is refused, again at once, as a client with a fault does."""
    async with httpx.AsyncClient(trust_env=False) as http:
        while not over():
            answer = await http.post(f"{endpoint}/v1/chat/completions", json={"max_tokens": 1, "refused": True})
            assert answer.status_code == 400


async def test_clients_that_are_refused_all_the_time_are_no_hang(node: FakeNode) -> None:
    endpoint = (await start(node)).endpoint
    until_then = asyncio.get_running_loop().time() + 5 * HUNG_S  # the absence of a report is what is looked at

    def over() -> bool:
        return bool(node.changes) or asyncio.get_running_loop().time() > until_then

    await asyncio.gather(*(refused_until(endpoint, over) for _ in range(8)))
    assert node.changes == []


async def test_a_core_that_hangs_is_found_among_refusals(node: FakeNode) -> None:
    endpoint = (await start(node)).endpoint
    await freeze(endpoint, 1)
    _, ended = streams.begin(endpoint, 2, 5)
    await come_to(endpoint, (0, 2))
    patience = asyncio.get_running_loop().time() + 20

    def over() -> bool:
        return bool(node.changes) or asyncio.get_running_loop().time() > patience

    await refused_until(endpoint, over)
    assert [change.health for change in node.changes] == [ShardHealth.UNHEALTHY]
    await freeze(endpoint, 0)
    await ended


async def test_a_drain_waits_for_what_the_gauges_do_not_show(node: FakeNode) -> None:
    """As it was seen of vLLM: one request told by a step, the others came before the next, which took long."""
    endpoint = (await start(node)).endpoint
    first, first_ended = streams.begin(endpoint, 1, 300)
    await until(lambda: first[0].pieces)
    await freeze(endpoint, 1)
    others, others_ended = streams.begin(endpoint, 39, 5)
    await come_to(endpoint, (1, 40))
    assert (await drain(node, 0.3)).left_in_flight == 40
    draining = asyncio.create_task(drain(node, 60))
    await freeze(endpoint, 0)
    await asyncio.gather(first_ended, others_ended)
    assert all(one.whole for one in (*first, *others))
    assert (await draining).left_in_flight == 0


@contextmanager
def client_that_takes_nothing(endpoint: str, body: dict[str, object]) -> Iterator[None]:
    command = [sys.executable, "-c", NOT_TAKEN, endpoint.rpartition(":")[2], json.dumps(body)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        yield
        client.communicate(b"\n")


async def test_a_client_that_takes_nothing_is_no_hang_and_is_cut_by_a_drain(node: FakeNode) -> None:
    endpoint = (await start(node)).endpoint
    body = {"model": "tiny", "messages": [], "max_tokens": 20, "size": 1_000_000, "stream": True}
    with client_that_takes_nothing(endpoint, body):
        _, ended = streams.begin(endpoint, 1, 30)
        await ended  # its own twenty tokens were made before these thirty
        await come_to(endpoint, (0, 0))
        await asyncio.sleep(3 * HUNG_S)  # time must pass here: the absence of a report is what is looked at
        assert node.changes == []
        assert (await drain(node, 0.3)).left_in_flight == 1
    assert (await drain(node, 30)).left_in_flight == 0

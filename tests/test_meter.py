"""Looks at stand-in engines: what each works on, the silent ones left out, and none of them in the others' way."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from agent.engines import ADAPTERS
from agent.loads import Loads
from agent.meter import Meter
from agent.probe import Probe
from fleet.spec import Engine
from tests.fake_engines.node import FakeNode
from tests.waiting import until

LOOK_S = 0.05


class Bench:
    """A node with a meter that looks often."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.loads = Loads(gap_s=0)
        self.woken = asyncio.Event()
        self.meter = Meter(node.ledger, node.probe, node.starter.adapters, self.loads, self.woken.set, look_s=LOOK_S)
        self.endpoints: dict[str, str] = {}

    async def start(self, replica: str, *knobs: str) -> None:
        started = await ActivityEnvironment().run(
            self.node.shards.start_shard, self.node.request(*knobs, replica=replica)
        )
        self.endpoints[replica] = started.endpoint

    async def turn(self, replica: str, knob: str, value: object) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(f"{self.endpoints[replica]}/{knob}/{value}", json={})

    async def looks(self, replica: str) -> int:
        async with httpx.AsyncClient(trust_env=False) as http:
            return int((await http.get(f"{self.endpoints[replica]}/looks")).text)

    async def looked(self, replica: str, times: int = 2) -> None:
        """Wait until it has been looked at so many times from now on."""
        seen = await self.looks(replica)

        async def more() -> bool:
            return await self.looks(replica) >= seen + times

        await until(more)

    @property
    def due(self) -> dict[str, int]:
        return {load.replica: load.in_flight for load in self.loads.due(time.monotonic())}

    def taken(self) -> None:
        self.loads.taken(self.loads.due(time.monotonic()), time.monotonic())


@asynccontextmanager
async def bench(home: Path) -> AsyncIterator[Bench]:
    async with Probe() as probe:
        node = FakeNode(home, probe)
        made = Bench(node)
        running = asyncio.create_task(made.meter.run())
        try:
            yield made
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.wait([running])
            await node.close()


async def test_each_engine_is_asked_and_a_change_wakes(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.start("a-0")
        await one.start("b-0", "busy=3")
        await asyncio.wait_for(one.woken.wait(), 10)
        assert one.due == {"b-0": 3}
        one.taken()
        await one.turn("a-0", "busy", 1)
        await one.turn("b-0", "busy", 0)
        await until(lambda: one.due == {"a-0": 1, "b-0": 0})
        one.taken()
        one.woken.clear()
        await one.turn("a-0", "busy", 0)
        await until(lambda: one.due == {"a-0": 0})
        one.taken()
        await one.looked("a-0")
        one.woken.clear()
        await one.looked("a-0")
        assert not one.woken.is_set(), "nothing wakes while all is idle"


@pytest.mark.parametrize("metrics", ["hang", "bare", "broken"])
async def test_an_engine_that_does_not_say_is_left_out_and_delays_nobody(tmp_path: Path, metrics: str) -> None:
    async with bench(tmp_path) as one:
        await one.start("a-0", "busy=2")
        await one.start("b-0", "busy=2")
        await until(lambda: one.due == {"a-0": 2, "b-0": 2})
        await one.turn("a-0", "metrics", metrics)
        await until(lambda: one.due == {"b-0": 2})
        await one.turn("b-0", "busy", 5)
        await until(lambda: one.due == {"b-0": 5}, 2)


async def test_one_that_hung_is_asked_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.start("a-0", "busy=2", "metrics=hang")
        await until(lambda: one.looks("a-0"))
        await one.turn("a-0", "metrics", "full")
        await until(lambda: one.due == {"a-0": 2}, 15)


async def test_a_request_between_two_looks_is_seen_by_its_tokens(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.start("a-0", "tokens=100")
        await one.looked("a-0")
        assert one.due == {}, "what it did before the first look is past"
        await one.turn("a-0", "tokens", 140)
        await asyncio.wait_for(one.woken.wait(), 10)
        await one.looked("a-0")
        assert one.due == {}, "and it is idle again"


async def test_a_replica_that_is_stopped_is_forgotten(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.start("a-0", "busy=2")
        await until(lambda: one.due == {"a-0": 2})
        request = one.node.request(replica="a-0")
        await one.node.turns.stop(request.shard, 0)
        await until(lambda: one.due == {})


async def test_only_the_first_shard_of_a_gang_counts(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        await one.start("a-0", "busy=2")
        await until(lambda: one.due == {"a-0": 2})
        (entry,) = one.node.ledger.entries()
        one.node.ledger.drop(entry)
        one.node.ledger.put(entry.model_copy(update={"shard": entry.shard.model_copy(update={"rank": 1})}))
        await until(lambda: one.due == {})


LLAMACPP = """
llamacpp:prompt_tokens_total 7
llamacpp:tokens_predicted_total 5
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""
VLLM = """
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:prompt_tokens_total{engine="0"} 1.2e+03
vllm:generation_tokens_total{engine="0"} 34.0
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 1.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:prompt_tokens_total{model_name="m"} 8.0
sglang:generation_tokens_total{model_name="m"} 2.0
"""
METRICS = [(Engine.LLAMACPP, LLAMACPP, 3, 12), (Engine.VLLM, VLLM, 3, 1234), (Engine.SGLANG, SGLANG, 1, 10)]


@pytest.mark.parametrize(("engine", "metrics", "in_flight", "tokens"), METRICS, ids=[case[0] for case in METRICS])
def test_every_engine_says_what_it_works_on_and_has_worked(
    engine: Engine, metrics: str, in_flight: int, tokens: int
) -> None:
    adapter = ADAPTERS[engine]
    assert (adapter.in_flight(metrics), adapter.tokens(metrics)) == (in_flight, tokens)
    assert (adapter.in_flight(""), adapter.tokens("")) == (None, None)

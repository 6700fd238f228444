"""Engines that hang, are late or busy, with the stand-in: what the agent reports, and what it bears."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from activities.node_contract import ShardHealth
from agent.probe import Probe
from fleet.reasons import Reason
from tests.fake_engines.acts import start
from tests.fake_engines.node import FakeNode
from tests.waiting import until

HUNG_S = 1.0


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe, unhealthy_after_s=0.3, hung_after_s=HUNG_S)
        yield made
        await made.close()


async def turn(endpoint: str, knob: str, value: object) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        await http.post(f"{endpoint}/{knob}/{value}", json={})


async def looks(endpoint: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        return int((await http.get(f"{endpoint}/looks")).text)


async def test_frozen_counters_while_requests_wait(node: FakeNode) -> None:
    endpoint = (await start(node, "busy=3", "tokens=7")).endpoint
    await until(lambda: node.changes, 20)
    (change,) = node.changes
    assert change.health is ShardHealth.UNHEALTHY
    assert change.failure.reason is Reason.ENGINE_GONE
    assert change.failure.node == "n1"
    assert "hangs: /health is fine, but nothing moved for" in change.failure.detail
    assert change.failure.detail.endswith("with 3 requests in flight")
    await turn(endpoint, "tokens", 8)
    seen = await looks(endpoint)

    async def looked() -> bool:
        return await looks(endpoint) > seen + 1

    await until(looked)
    assert len(node.changes) == 1, "one that is told is not told again"


@pytest.mark.parametrize("knob", ["moves", "idle", "late", "mute"])
async def test_alive(node: FakeNode, knob: str) -> None:
    """Busy, idle, late with its metrics, or without any: nothing is reported in many times the patience."""
    endpoint = (await start(node, f"busy={0 if knob == 'idle' else 900}", "tokens=7")).endpoint
    if knob in ("late", "mute"):
        await turn(endpoint, "metrics", "hang" if knob == "late" else "bare")
    for tokens in range(8, 24):  # time must pass here: the absence of a report is what is looked at
        if knob == "moves":
            await turn(endpoint, "tokens", tokens)
        await asyncio.sleep(HUNG_S / 4)
    assert node.changes == []

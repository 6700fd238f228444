"""The activities of a node as Temporal calls them, without Temporal, and what must be true after them."""

import os
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.node_contract import (
    ShardRef,
    StartedShard,
    StoppedShard,
    StopShard,
)
from agent.layout import Layout
from agent.processes import Mark, mark
from fleet.reasons import StepError
from tests.fake_engines.node import FakeNode


async def start(node: FakeNode, *knobs: str, env: ActivityEnvironment | None = None, **more: Any) -> StartedShard:
    request = node.request(*knobs, **more)
    return await (env or ActivityEnvironment()).run(node.shards.start_shard, request)


async def stop(node: FakeNode, generation: int = 1, grace_s: float = 5.0) -> StoppedShard:
    request = StopShard(shard=ShardRef(replica="tiny-0", generation=generation), grace_s=grace_s)
    return await ActivityEnvironment().run(node.shards.stop_shard, request)


async def failed(node: FakeNode, *knobs: str, **more: Any) -> StepError:
    with pytest.raises(StepError) as caught:
        await start(node, *knobs, **more)
    return caught.value


def engine_mark(pid: int) -> Mark:
    found = mark(pid)
    assert found is not None
    return found


def assert_nothing_left(node: FakeNode) -> None:
    assert node.supervisor.running_launches() == {}
    assert node.ledger.entries() == ()
    assert list(node.layout.weights.glob("*.partial")) == []


def ended_launch(layout: Layout, replica: str, *, size: int, changed: float) -> None:
    """The files of a launch that is over."""
    directory = layout.logs / f"{replica}.0"
    directory.mkdir(parents=True)
    for suffix, content in ((".log", bytes(size)), (".exit", b'{"code": 0, "signal": null}')):
        path = directory / f"1-1{suffix}"
        path.write_bytes(content)
        os.utime(path, (changed, changed))

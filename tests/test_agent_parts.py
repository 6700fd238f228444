"""The agent's parts as they are tied together: what one of them is told of the others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import ByteSize

from activities.node_contract import ShardRef
from agent.__main__ import Parts, compose
from agent.layout import Layout
from agent.ledger import Entry
from agent.machine import ThisMachine
from agent.probe import Probe
from fleet.reasons import Reason, StepError
from fleet.spec import Engine, Format, Weights
from runtime.config import AgentConfig, WeightsConfig
from runtime.engine_keys import EngineKeys
from tests.transfers import MIB, content, listed, write


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    quota = WeightsConfig(hub_cache=None, quota=ByteSize(2 * MIB + MIB // 2))
    config = AgentConfig(node="n1", data=tmp_path / "node", keep_free=0, weights=quota)
    async with Probe() as probe:
        made = compose(config, ThisMachine(), EngineKeys(), Layout(config.data), probe, "an incarnation", "")
        yield made
        await made.starter.weights.close()


async def brought(parts: Parts, home: Path, name: str) -> None:
    data = {f"{name}.gguf": content(name, MIB)}
    mirror = write(home / "mirror" / name, data).as_uri()
    wanted = Weights(model_id=name, format=Format.GGUF, entry=f"{name}.gguf", files=tuple(listed(data)), mirror=mirror)
    await parts.starter.weights.bring(wanted, lambda done, total: None)
    await parts.starter.weights.close()


async def test_weights_of_an_engine_in_the_ledger_are_never_removed(parts: Parts, tmp_path: Path) -> None:
    ledger, weights = parts.starter.ledger, parts.starter.weights
    entries = [
        Entry(
            shard=ShardRef(replica=f"{name}-0", generation=1),
            model=name,
            engine=Engine.LLAMACPP,
            port=1,
            endpoint="",
            stem="",
            weights_id=name,
        )
        for name in "ab"
    ]
    await brought(parts, tmp_path, "a")
    await brought(parts, tmp_path, "b")
    ledger.put(entries[0])
    await brought(parts, tmp_path, "c")
    assert weights.held() == ("a", "c"), "the older one has an engine"
    ledger.put(entries[1].model_copy(update={"weights_id": "c"}))
    with pytest.raises(StepError) as caught:
        await brought(parts, tmp_path, "b")
    assert caught.value.failure.reason is Reason.DISK
    assert weights.held() == ("a", "c")
    ledger.drop(entries[0])
    await brought(parts, tmp_path, "b")
    assert weights.held() == ("b", "c")

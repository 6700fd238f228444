"""The preflight: what a node says of one shard that might be placed on it, were it empty."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.node_contract import PreflightRequest
from agent.gpus import Gpu, Holder
from agent.machine import ThisMachine
from agent.probe import Probe
from fleet.reasons import Reason
from fleet.spec import Engine, ShardNeed
from tests.fake_engines.node import FakeNode

GIB = 1024**3


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe)
        yield made
        await made.close()


@pytest.mark.parametrize(
    ("engine", "memory", "disk", "reason"),
    [
        (Engine.LLAMACPP, 1, 1000, None),
        (Engine.VLLM, 1, 1000, Reason.ENGINE_MISSING),
        (Engine.LLAMACPP, 10_000 * GIB, 1000, Reason.MEMORY),
        (Engine.LLAMACPP, 1, 10**17, Reason.DISK),
    ],
)
async def test_preflight(node: FakeNode, engine: Engine, memory: int, disk: int, reason: Reason | None) -> None:
    weights = node.mirror()
    weights = weights.model_copy(update={"files": (weights.files[0].model_copy(update={"size": disk}),)})
    request = PreflightRequest(engine=engine, need=ShardNeed(memory=memory), weights=weights)
    result = await ActivityEnvironment().run(node.shards.preflight, request)
    assert (result.failure.reason if result.failure else None) is reason
    assert result.failure is None or result.failure.node == "n1"
    assert result.engine_installed is (engine is Engine.LLAMACPP)
    assert result.free_memory > 0


class TwoGpus(ThisMachine):
    """GPUs of 24 and 80 GiB, of which others hold a part."""

    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(Gpu(f"GPU-{n}", "X", n * GIB, 4 * GIB, (Holder(1, 4 * GIB),)) for n in (24, 80))


@pytest.mark.parametrize(
    ("gpus", "memory", "free", "says"),
    [
        (1, 80 * GIB, 76 * GIB, ""),
        (2, 24 * GIB, 20 * GIB, ""),
        (1, 81 * GIB, 76 * GIB, "gpu_memory: one shard needs a GPU with 81 GiB, the node's have 80 GiB (on n1)"),
        (2, 30 * GIB, 20 * GIB, "gpu_memory: one shard needs 2 GPUs with 30 GiB each, the node's have 24 GiB (on n1)"),
        (3, GIB, 20 * GIB, "gpu_count: one shard needs 3 GPUs, the node has 2 (on n1)"),
    ],
)
async def test_preflight_of_gpus(tmp_path: Path, gpus: int, memory: int, free: int, says: str) -> None:
    async with Probe() as probe:
        node = FakeNode(tmp_path, probe, machine=TwoGpus())
        need = ShardNeed(memory=memory, gpus=gpus)
        request = PreflightRequest(engine=Engine.LLAMACPP, need=need, weights=node.mirror())
        result = await ActivityEnvironment().run(node.shards.preflight, request)
    assert (result.failure.cause if result.failure else "") == says
    assert result.free_memory == free

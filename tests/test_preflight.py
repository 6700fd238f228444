"""The preflight: what a node says of one shard that might be placed on it, were it empty; and nodes that are silent."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities import contract
from activities.contract import CheckRequest, CheckResult
from activities.node_contract import PreflightRequest
from agent.gpus import Gpu, Holder
from agent.machine import ThisMachine
from agent.probe import Probe
from fleet.reasons import Reason
from fleet.spec import Engine, ShardNeed
from tests.control import Answers, Cell, control_plane
from tests.fake_engines.node import FakeNode
from tests.waiting import until

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


class Candidates(Answers):
    """The check names the first of a model's candidates that was not silent, else the first that was."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates: dict[str, list[str]] = {}

    @activity.defn(name=contract.CHECK_FIT)
    async def check_fit(self, request: CheckRequest) -> CheckResult:
        found = await super().check_fit(request)
        known = self.candidates.get(request.request.name or "", [])
        willing = [node for node in known if node not in request.silent] or list(request.silent[:1])
        return found.model_copy(update={"candidate": willing[0] if known else ""})


async def test_a_candidate_that_does_not_answer_is_waited_for_or_replaced(client: Client) -> None:
    """Both at once: each takes the ten seconds in which a silent node is asked."""
    answers = Candidates()
    async with control_plane(client, answers=answers) as cell, cell.node("n1") as n1:
        await n1.join()
        n2 = cell.node("n2")
        answers.candidates = {"other": ["nobody", n1.name], "back": [n2.name]}
        jobs = [await cell.start({"repo": "file:/m.gguf", "name": name}) for name in ("other", "back")]

        async def told() -> bool:
            details = [await _detail(cell, job) for job in jobs]
            return f"{n2.name} does not answer: waiting for it or another node" in details[1]

        await until(told, 30.0)
        async with n2:
            results = await asyncio.gather(*(job.result() for job in jobs))
        assert [result.model for result in results] == ["other", "back"]
        details = [await _detail(cell, job) for job in jobs]
        assert details[0].startswith(f"fits; {n1.name}: llamacpp")
        assert details[0].endswith("; nobody did not answer")
        assert details[1].startswith(f"fits; {n2.name}: llamacpp")
        assert "did not answer" not in details[1]


async def test_a_node_that_is_lost_meanwhile_leaves_the_wait_to_the_placement(client: Client) -> None:
    answers = Candidates()
    async with control_plane(client, answers=answers) as cell, cell.node("n1") as n1:
        await n1.join()
        answers.candidates = {"m": ["nobody"]}
        job = await cell.start({"repo": "file:/m.gguf", "name": "m"})
        await until(lambda: answers.calls.count(contract.CHECK_FIT) == 1, 30.0)
        answers.candidates = {}
        await job.result()
        assert await _detail(cell, job) == "fits; nobody did not answer"


async def _detail(cell: Cell, job: Any) -> str:
    return (await cell.status(job)).steps[2].detail

"""What runs really took: measured on a node, told with the stop, kept by the fleet in bounds, believed by a check."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from activities.node_contract import StoppedShard, StopShard
from agent.gpus import Gpu, Holder
from agent.machine import ThisMachine
from agent.probe import Probe
from agent.processes import resident
from fleet.check import examine
from fleet.facts import ReplicaEvent, replica_changed
from fleet.peaks import KEPT, Measured, Run, believed, digest_of, peak_of, with_peak
from fleet.shape import Layer, ModelShape
from fleet.spec import Engine, Format, JobRequest, Weights
from fleet.state import CPU, FleetState
from tests.fake_engines.node import FakeNode
from tests.test_fit import fleet
from tests.waiting import until

MIB = 1024**2
GIB = 1024**3
RUN = Run(weights="m-1", engine=Engine.LLAMACPP, context_length=4096, concurrency=4, device=CPU)


def told(peak: int, run: Run = RUN) -> Measured:
    return Measured(run=run, peak=peak)


# -- kept and believed ------------------------------------------------------------------------------------------------


def test_the_higher_of_two_peaks_is_kept() -> None:
    known = with_peak(with_peak((), told(100), 1.0), told(90), 2.0)
    assert known == (Measured(run=RUN, peak=100, at=1.0),)
    assert with_peak(known, told(110), 3.0) == (Measured(run=RUN, peak=110, at=3.0),)
    assert with_peak(known, told(0), 3.0) is known


def test_old_runs_are_forgotten() -> None:
    known: tuple[Measured, ...] = ()
    for number in range(KEPT + 5):
        known = with_peak(known, told(1, RUN.model_copy(update={"weights": f"m-{number}"})), 1.0)
    assert len(known) == KEPT
    assert known[0].run.weights == "m-5"


@pytest.mark.parametrize(
    ("change", "devices", "peak"),
    [
        ({}, (CPU,), 100),
        ({}, ("A100",), 0),
        ({}, (), 0),
        ({"context_length": 8192}, (CPU,), 0),
        ({"concurrency": 1}, (CPU,), 0),
        ({"args": digest_of(("n_batch=1",))}, (CPU,), 0),
        ({"weights": "m-2"}, (CPU,), 0),
        ({"engine": Engine.VLLM}, (CPU,), 0),
    ],
)
def test_only_the_same_run_counts(change: dict[str, object], devices: tuple[str, ...], peak: int) -> None:
    known = with_peak((), told(100), 1.0)
    assert peak_of(known, RUN.model_copy(update={"device": "", **change}), devices) == peak


def test_the_worst_of_several_kinds_of_gpus_counts() -> None:
    known: tuple[Measured, ...] = ()
    for device, peak in (("A100", 7), ("H100", 9), ("L4", 11)):
        known = with_peak(known, told(peak, RUN.model_copy(update={"device": device, "gpus": 1})), 1.0)
    assert peak_of(known, RUN.model_copy(update={"gpus": 1}), {"A100", "H100"}) == 9


def test_engines_that_fill_what_they_are_given_are_never_given_less() -> None:
    assert believed(Engine.LLAMACPP, 1000, 0) == 1000
    assert believed(Engine.LLAMACPP, 1000, 800) == 840
    assert believed(Engine.LLAMACPP, 1000, 2000) == 2100
    assert believed(Engine.VLLM, 1000, 800) == 1000
    assert believed(Engine.VLLM, 1000, 1200) == 1200


SHAPE = ModelShape(
    architecture="llama",
    weights_bytes=GIB,
    layers=(Layer(kv_heads=8, key_dim=128, value_dim=128),) * 32,
    heads=8,
    embedding=1024,
    feed_forward=4096,
    vocabulary=1000,
    context_length=8192,
)
WEIGHTS = Weights(model_id="m-1", format=Format.GGUF, entry="m.gguf", files=(), mirror="file:/m")
WISH = JobRequest(repo="file:/m.gguf", name="m")


def test_a_check_believes_an_earlier_run_and_shows_the_estimate_beside_it() -> None:
    state = fleet(n1={})
    before = examine(SHAPE, WEIGHTS, WISH, state)
    assert before.estimate is not None
    assert (before.measured, before.need.memory) == (0, before.estimate.total)
    after = examine(SHAPE, WEIGHTS, WISH, state.model_copy(update={"peaks": (told(2 * GIB),)}))
    assert (after.measured, after.need.memory, after.estimate) == (2 * GIB, 2 * GIB + 2 * GIB // 20, before.estimate)
    assert "(an earlier run took 2 GiB; estimated " in after.sentence


def test_a_model_whose_need_cannot_be_told_is_known_once_it_ran() -> None:
    shape = ModelShape(architecture="llama", weights_bytes=GIB, missing=("number of KV heads",))
    found = examine(shape, WEIGHTS, WISH, fleet(n1={}).model_copy(update={"peaks": (told(2 * GIB),)}))
    assert (found.need.memory, found.reason) == (2 * GIB, None)


def test_the_fleet_takes_a_peak_whatever_became_of_the_replica() -> None:
    event = ReplicaEvent(replica="gone-0", generation=3, state=None, measured=told(7))
    state = replica_changed(FleetState(), event, 5.0)
    assert state.peaks == (Measured(run=RUN, peak=7, at=5.0),)
    assert replica_changed(state, event, 6.0) is state


# -- measured ---------------------------------------------------------------------------------------------------------


def test_memory_of_processes() -> None:
    """Measured on a fresh process: this one has memory to spare, which ballast would only take up."""
    grows = (
        "import os, sys; print('here', flush=True); sys.stdin.readline(); "
        "ballast = os.urandom(2**25); print(len(ballast), flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", grows], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        one = resident([process.pid])
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{32 * MIB}\n"
        grown = resident([process.pid])
        process.stdin.close()
    assert 30 * MIB < grown - one < 60 * MIB
    assert resident([2**22 + 1]) == 0
    with_child = resident([os.getpid(), os.getppid()])
    assert with_child >= resident([os.getppid()])


async def stopped(node: FakeNode) -> StoppedShard:
    request = StopShard(shard=node.request().shard)
    found: StoppedShard = await ActivityEnvironment().run(node.shards.stop_shard, request)
    return found


async def test_a_stop_tells_the_most_an_engine_took(tmp_path: Path) -> None:
    async with Probe() as probe:
        node = FakeNode(tmp_path, probe)
        running = asyncio.create_task(node.peaks.run())
        try:
            request = node.request("tokens=0")
            started = await ActivityEnvironment().run(node.shards.start_shard, request)
            assert started.measured is None, "it has answered nothing: what it needs shows later"
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.post(f"{started.endpoint}/tokens/12", json={})
            (entry,) = node.ledger.entries()

            async def worked() -> bool:
                return await node.peaks.measured(entry) is not None

            await until(worked)
            found = (await stopped(node)).measured
        finally:
            running.cancel()
            await asyncio.wait([running])
            await node.close()
    assert found is not None
    assert found.run == Run(
        weights="tiny-abc",
        engine=Engine.LLAMACPP,
        context_length=512,
        concurrency=2,
        args=digest_of(("tokens=0",)),
        device=CPU,
    )
    assert 5 * MIB < found.peak < 200 * MIB, "a Python process"


class TwoGpus(ThisMachine):
    """What the engine holds on two GPUs, and another process beside it."""

    pid = 0

    def gpus(self) -> tuple[Gpu, ...]:
        mine = ((Holder(self.pid, 300),), (Holder(self.pid, 500), Holder(1, 9000)))
        return tuple(Gpu(f"GPU-{n}", "A100", GIB, 0, holders) for n, holders in enumerate(mine))


async def test_on_gpus_the_fullest_counts(tmp_path: Path) -> None:
    async with Probe() as probe:
        machine = TwoGpus()
        node = FakeNode(tmp_path, probe, machine=machine)
        try:
            shares = tuple(node.request().devices[0].model_copy(update={"uuid": f"GPU-{n}"}) for n in (0, 1))
            request = node.request("tokens=5").model_copy(update={"devices": shares, "gpus": 2})
            await ActivityEnvironment().run(node.shards.start_shard, request)
            (entry,) = node.ledger.entries()
            assert entry.process is not None
            machine.pid = entry.process.engine.pid
            found = await node.peaks.measured(entry)
            machine.pid = 0
        finally:
            await node.close()
    assert found is not None
    assert (found.peak, found.run.device, found.run.gpus) == (500, "A100", 2)

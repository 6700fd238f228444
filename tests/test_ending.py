"""The end of an engine is over when its processes are gone and its GPUs are free; what will not go is held against the
node until it is gone after all."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from temporalio.testing import ActivityEnvironment

from activities.node_contract import ShardHealth
from agent.gpus import Gpu, Holder
from agent.machine import ThisMachine
from agent.probe import Probe
from agent.recovery import recover, reported
from fleet.reasons import StepError
from fleet.state import CPU, DeviceShare
from tests.fake_engines.acts import assert_nothing_left, start, stop
from tests.fake_engines.node import FakeNode
from tests.freezer import frozen_group
from tests.waiting import until

GIB = 1024**3


class Gpus:
    """Two GPUs; who holds memory on which is said by the test."""

    def __init__(self) -> None:
        self.holders: dict[str, tuple[Holder, ...]] = {}
        self.looks = 0

    def __call__(self) -> tuple[Gpu, ...]:
        self.looks += 1
        return tuple(
            Gpu(uuid, "H100", 80 * GIB, sum(one.memory for one in held), held)
            for uuid in ("GPU-0", "GPU-1")
            for held in [self.holders.get(uuid, ())]
        )


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
async def node(tmp_path: Path, gpus: Gpus) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe, machine=ThisMachine(gpus))
        yield made
        await made.close()


async def start_on_gpu(node: FakeNode, *knobs: str) -> int:
    """Its pid."""
    devices = (DeviceShare(uuid="GPU-0", memory=GIB), DeviceShare(uuid=CPU, memory=1))
    request = node.request(*knobs).model_copy(update={"devices": devices, "gpus": 1})
    return (await ActivityEnvironment().run(node.shards.start_shard, request)).pid


@contextlib.asynccontextmanager
async def tried_again(node: FakeNode) -> AsyncIterator[None]:
    """As the agent does all the time."""
    task = asyncio.create_task(node.endings.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_end_waits_for_the_memory_of_its_own_processes_alone(node: FakeNode, gpus: Gpus) -> None:
    pid = await start_on_gpu(node)
    gpus.holders = {"GPU-0": (Holder(pid, GIB), Holder(1, GIB)), "GPU-1": (Holder(pid, GIB),)}
    slow = replace(node, release_wait_s=20.0)
    ending = asyncio.create_task(stop(slow))
    looks = gpus.looks
    await until(lambda: gpus.looks > looks + 2)
    assert not ending.done()
    gpus.holders = {"GPU-0": (Holder(1, GIB),), "GPU-1": (Holder(pid, GIB),)}
    stopped = await ending
    assert (stopped.was_running, stopped.held) == (True, "")
    assert slow.endings.quarantine() == ""


async def test_memory_that_does_not_come_back_is_held_against_the_node_until_it_does(
    node: FakeNode, gpus: Gpus
) -> None:
    pid = await start_on_gpu(node)
    gpus.holders = {"GPU-0": (Holder(pid, 40 * GIB),)}
    stopped = await stop(node)
    sentence = f"pid {pid} (gone) of tiny-0 still holds 40 GiB on GPU-0 0 s after its end"
    assert stopped.held == sentence
    assert node.quarantines == [sentence]
    assert_nothing_left(node)  # of what can be ended; its place in the ledger is free too
    later = node.successor()
    await recover(later.starter)
    assert later.endings.quarantine() == sentence, "the next agent knows it"
    async with tried_again(later):
        gpus.holders = {}
        await until(lambda: later.quarantines == [""])
    assert later.successor().endings.quarantine() == ""


async def test_a_pid_that_another_process_has_now_holds_nothing_of_ours(node: FakeNode, gpus: Gpus) -> None:
    await start_on_gpu(node)
    entry = node.ledger.entries()[0]
    assert entry.process is not None
    gpus.holders = {"GPU-0": (Holder(os.getpid(), GIB),)}
    reused = entry.process.shim.model_copy(update={"pid": os.getpid(), "start_ticks": 1})
    ended = await node.endings.end(entry, entry.process.model_copy(update={"shim": reused}), 1)
    assert ended.held == ""


async def test_nothing_is_asked_of_gpus_for_an_engine_on_the_cpu(node: FakeNode, gpus: Gpus) -> None:
    await start(node)
    looks = gpus.looks
    await stop(node)
    assert gpus.looks == looks


async def test_an_engine_that_ends_by_itself_is_reported_also_where_its_memory_stays(
    node: FakeNode, gpus: Gpus
) -> None:
    pid = await start_on_gpu(node)
    gpus.holders = {"GPU-0": (Holder(pid, GIB),)}
    os.kill(pid, signal.SIGKILL)
    await until(lambda: node.changes)
    assert node.changes[0].health is ShardHealth.EXITED
    reported(node.starter, node.changes[0])
    assert node.ledger.entries() == ()
    assert f"pid {pid}" in node.endings.quarantine()


async def test_memory_of_a_child_of_an_engine_that_dies_before_it_serves_is_waited_for(
    node: FakeNode, gpus: Gpus, tmp_path: Path
) -> None:
    starting = asyncio.create_task(start_on_gpu(node, "slow=60", f"loner={tmp_path}/loner"))

    def seen() -> int:
        members = {member.pid for entry in node.ledger.entries() for member in entry.members}
        loner = int((tmp_path / "loner").read_text()) if members and (tmp_path / "loner").exists() else 0
        return loner if loner in members else 0

    loner = await until(seen, 20)
    gpus.holders = {"GPU-0": (Holder(loner, 40 * GIB),)}
    (entry,) = node.ledger.entries()
    assert entry.process is not None
    os.kill(entry.process.engine.pid, signal.SIGKILL)
    with pytest.raises(StepError, match="killed by signal 9"):
        await starting
    assert node.endings.quarantine() == f"pid {loner} (gone) of tiny-0 still holds 40 GiB on GPU-0 0 s after its end"
    assert_nothing_left(node)


@pytest.fixture
def frozen() -> Iterator[Path]:
    with frozen_group() as group:
        yield group


async def test_a_process_that_outlives_kill_is_held_against_the_node_and_ended_when_it_can_be(
    node: FakeNode, frozen: Path, tmp_path: Path
) -> None:
    hasty = replace(node, kill_wait_s=0.5)
    await start(hasty, f"loner={tmp_path}/loner")
    loner = int((tmp_path / "loner").read_text())
    (frozen / "cgroup.procs").write_text(str(loner))
    stopped = await stop(hasty)
    assert stopped.killed
    assert stopped.held == f"pid {loner} (python) outlives KILL: it is left of tiny-0"
    assert hasty.endings.quarantine() == stopped.held
    assert hasty.ledger.entries() == ()
    async with tried_again(hasty):
        (frozen / "freezer.state").write_text("THAWED")
        await until(lambda: hasty.endings.quarantine() == "")
    assert_nothing_left(hasty)
    await until(lambda: not (frozen / "cgroup.procs").read_text())


async def test_a_start_does_not_wait_for_what_an_older_one_left(node: FakeNode, frozen: Path, tmp_path: Path) -> None:
    hasty = replace(node, kill_wait_s=0.5)
    await start(hasty, f"loner={tmp_path}/loner")
    (frozen / "cgroup.procs").write_text((tmp_path / "loner").read_text())
    again = await start(hasty, generation=2)
    assert again.shard.generation == 2
    assert "outlives KILL" in hasty.endings.quarantine()
    (frozen / "freezer.state").write_text("THAWED")
    async with tried_again(hasty):
        await until(lambda: hasty.endings.quarantine() == "")
    await until(lambda: not (frozen / "cgroup.procs").read_text())
    assert [entry.shard.generation for entry in hasty.ledger.entries()] == [2]

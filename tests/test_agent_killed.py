"""kill -9 of the agent at each point of a start and of a stop: the next one finds all, and leaves nothing behind."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.node_contract import JoinAnswer
from agent.probe import Probe
from agent.recovery import adopt, recover, running
from tests.fake_engines.acts import assert_nothing_left, start, stop
from tests.fake_engines.dying import START_POINTS, STOP_POINTS
from tests.fake_engines.node import FakeNode
from tests.real_engine import ROOT

SLOW = "slow=0.3"
"""Not ready at once: there is something to wait for."""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    """Whoever comes after the one that was killed. Its parts are made by `successor`, as late as an agent's."""
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe)
        yield made
        await made.close()


async def killed_at(node: FakeNode, point: str, act: str, *knobs: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.fake_engines.dying", str(node.home), str(node.ports[0]), point, act, *knobs),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == -signal.SIGKILL, f"{point} was not reached: {said.decode()}"


def assert_all_is_known(node: FakeNode) -> None:
    """Whatever runs stands in the ledger, with its pids."""
    stems = {entry.stem for entry in node.ledger.entries() if entry.process is not None}
    assert set(node.supervisor.running_launches()) <= stems


@pytest.mark.parametrize(
    ("point", "claimed"),
    [*((point, True) for point in START_POINTS), ("after the spawn", False), ("while it is waited for", False)],
)
async def test_a_start_goes_on_or_goes_away(node: FakeNode, point: str, claimed: bool) -> None:
    await killed_at(node, point, "start", SLOW)
    launched = node.supervisor.running_launches()
    assert len(launched) <= 1
    later = node.successor()
    await recover(later.starter)
    assert_all_is_known(later)
    found = running(later.starter)
    assert len(found) == len(launched), "what runs is told to the fleet"
    if claimed:
        started = await start(later, SLOW)
        assert started.adopted is bool(launched)
        assert len(later.supervisor.running_launches()) == 1
        await stop(later)
    else:
        await adopt(later.turns, found, JoinAnswer(claimed=()))
    assert_nothing_left(later)
    await later.close()


@pytest.mark.parametrize("point", STOP_POINTS)
async def test_a_stop_goes_on(node: FakeNode, point: str, tmp_path: Path) -> None:
    first = node.successor()
    await start(first, "deaf=1", f"loner={tmp_path}/loner")
    await first.watch.close()
    await killed_at(node, point, "stop")
    later = node.successor()
    await recover(later.starter)
    assert_all_is_known(later)
    stopped = await stop(later, grace_s=0.1)
    assert stopped.was_running is (point != "before it is forgotten")
    assert_nothing_left(later)
    assert later.supervisor.running_launches() == {}
    await later.close()


async def test_what_no_ledger_names_is_ended(node: FakeNode) -> None:
    first = node.successor()
    await start(first)
    await first.watch.close()
    first.ledger.drop(first.ledger.entries()[0])
    later = node.successor()
    await recover(later.starter)
    assert_nothing_left(later)
    await later.close()

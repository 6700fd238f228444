"""Worker and agents whose clocks are ten minutes off, each its own way: everything goes as with right ones."""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from fleet.state import NodeState, ReplicaRecord, ReplicaState
from tests.system import System, system
from tests.waiting import until

LEASE = {"heartbeat_timeout_s": 5, "grace_s": 25}
"""Time enough for an agent to start on a busy machine, and nothing beside ten minutes."""
QUIET_S = 6.0
"""What a wrong clock makes look overdue by minutes is noticed meanwhile."""


@pytest.fixture(scope="module")
def shifted() -> dict[str, dict[str, str]]:
    """Variables for a process whose clock is fast or slow; how fast time goes by is as ever."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("libfaketime is not installed (on Debian and Ubuntu: apt install libfaketime)")
    both = {"LD_PRELOAD": str(found[0]), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {"fast": {**both, "FAKETIME": "+10m"}, "slow": {**both, "FAKETIME": "-10m"}}


def engine(running: System, node: str) -> int:
    """The pid of the one engine of a node, apart from the shim that holds it."""
    commands = {process.pid: " ".join(process.cmdline()) for process in running.engines()}
    (found,) = (pid for pid, command in commands.items() if f"/{node}/" in command and "shim.py" not in command)
    return found


def lives(replicas: Mapping[str, ReplicaRecord]) -> dict[str, tuple[int, ReplicaState, tuple[str, ...], str]]:
    """What a move or a restart would change."""
    return {one.id: (one.generation, one.state, one.nodes, one.endpoint) for one in replicas.values()}


@pytest.mark.usefixtures("real_engine")
async def test_clocks_ten_minutes_off_change_nothing(shifted: dict[str, dict[str, str]], tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        running.start_worker(variables=shifted["slow"])
        running.start_agent("n1", variables=shifted["fast"], lease=LEASE)
        running.start_agent("n2", variables=shifted["slow"], lease=LEASE)
        await running.ready("n1", "n2")
        result = await (await running.serve(replicas=2)).result()
        assert result.sentence == "tiny is serving: 2 replicas on n1, n2"
        before = (await running.state()).replicas
        engines = {node: engine(running, node) for node in ("n1", "n2")}

        # An agent whose clock jumps back by twenty minutes finds what it left.
        running.kill("n1")
        running.start_agent("n1", variables=shifted["slow"], lease=LEASE)
        await until(lambda: running.log("n1").count("lease held") == 2, 30.0)
        await asyncio.sleep(QUIET_S)
        after = await running.state()
        assert lives(after.replicas) == lives(before)
        assert {node.state for node in after.nodes.values()} == {NodeState.READY}
        assert {node: engine(running, node) for node in ("n1", "n2")} == engines

        # And a backoff of a second ends within a minute, whoever counts it.
        (ended,) = (replica for replica in before.values() if replica.nodes == ("n2",))
        psutil.Process(engines["n2"]).send_signal(signal.SIGKILL)
        await running.serving(ended.id, after=ended.generation)
        assert {replica.state for replica in (await running.state()).replicas.values()} == {ReplicaState.SERVING}

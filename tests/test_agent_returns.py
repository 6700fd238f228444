"""One agent for a node: a second one is refused and told who holds it; a later one takes over."""

import asyncio
import os
import sys
from pathlib import Path

from tests.real_engine import ROOT
from tests.system import system
from tests.waiting import until


async def test_a_second_agent_of_a_node_is_refused_with_the_holder(real_engine: None, tmp_path: Path) -> None:
    async with system(tmp_path) as running:
        running.start_agent("n1", tracing=False)
        await until(lambda: (running.home / "n1" / "agent.pid").exists(), 60)
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", "--config", str(running.home / "n1.yaml")),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await second.communicate()
        pid = running.processes["n1"].pid
        assert second.returncode == 2
        assert f"another agent (pid {pid}) runs this node from {tmp_path}/n1: stop it" in said.decode()
        running.kill("n1")
        running.start_agent("n1", tracing=False)
        await until(lambda: running.log("n1").count("agent starts") == 2, 60)

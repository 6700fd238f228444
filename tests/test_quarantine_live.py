"""An engine of which something stays, with a real agent and Fleet: its node takes nothing new until that is gone."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.layout import Layout
from agent.ledger import Ledger
from agent.supervisor import EngineProcess
from cli.views import NodeView
from tests.ctl import Ctl, ctl_environment
from tests.freezer import frozen_group
from tests.traced import Traced, traced
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

GPU = "GPU-0"
WAITS = "0/1 nodes fit {}: 1 node_quarantined"
OTHER = "models:\n  - {name: other, repo: file:/models/other.gguf, memory: 1GiB}\n"


class Node:
    """The one node, which has one GPU as its inventory file says, and ctl."""

    def __init__(self, made: Traced) -> None:
        self._made = made
        self._inventory = made.system.home / "inventory.yaml"
        home = made.system.home / "ctl"
        home.mkdir()
        (home / "server.yaml").write_text("mirror: {path: mirror}\n")
        self._ctl = Ctl(ctl_environment(home, made.system.address))

    async def start(self) -> None:
        self.holds({})
        self._made.start_agent("n1", inventory_file=str(self._inventory), release_s=1)
        await self._made.system.ready("n1")
        await (await self._made.serve("tiny", gpus=1, memory="10GiB")).result()

    def holds(self, memory: dict[int, str]) -> None:
        """Let the GPU be held by these pids."""
        processes = [{"pid": pid, "memory": size} for pid, size in memory.items()]
        gpu = {"uuid": GPU, "model": "H100", "total": "80GiB", "processes": processes}
        partial = self._inventory.with_suffix(".partial")
        partial.write_text(yaml.safe_dump({"gpus": [gpu]}))
        partial.replace(self._inventory)

    def process(self) -> EngineProcess:
        (entry,) = Ledger(Layout(self._made.system.home / "n1").ledger).entries()
        assert entry.process is not None
        return entry.process

    async def scale(self, replicas: int) -> None:
        await self._made.system.fleet.execute_update("scale", {"name": "tiny", "replicas": replicas})

    async def ctl(self, *arguments: str) -> str:
        code, out, err = await self._ctl.run(*arguments)
        assert (code, err) == (0, "")
        return out

    async def view(self) -> NodeView:
        (view,) = json.loads(await self.ctl("node", "list", "--json"))
        return NodeView.model_validate(view)

    async def model(self) -> dict[str, Any]:
        (view,) = json.loads(await self.ctl("model", "list", "--json"))
        return dict(view)

    async def closed_for(self, cause: str) -> None:
        """Every door says that it takes nothing new, and who is to blame."""

        async def quarantined() -> NodeView | None:
            view = await self.view()
            return view if view.state == "quarantined" else None

        assert (await until(quarantined, 60)).cause == cause
        await self.scale(1)

        async def waits() -> bool:
            return str((await self.model())["waiting"]) == WAITS.format("tiny")

        await until(waits, 60)
        explained = await self.ctl("model", "explain", "tiny")
        assert f"free n1 of what keeps it in quarantine ({cause}), or uncordon it" in explained
        file = self._made.system.home / "other.yaml"
        file.write_text(OTHER)
        planned = await self.ctl("model", "plan", "-v", "-f", str(file))
        assert f"waits: {WAITS.format('other')}" in planned
        assert "n1 excluded: node_quarantined" in planned

    async def opens(self) -> None:
        """It takes what waits, without anybody's help."""
        await until(lambda: self._made.system.serves(1), 60)
        view = await self.view()
        assert (view.state, view.cause) == ("ready", "")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with traced(tmp_path, agent=False) as made:
        node = Node(made)
        await node.start()
        yield node


async def test_gpu_memory_that_does_not_come_back(node: Node) -> None:
    pid = node.process().engine.pid
    node.holds({pid: "8GiB"})
    await node.scale(0)
    await node.closed_for(f"pid {pid} (gone) of tiny-0 still holds 8 GiB on {GPU} 1 s after its end")
    node.holds({})
    await node.opens()


async def test_a_process_that_does_not_go(node: Node) -> None:
    shim = node.process().shim.pid
    with frozen_group() as frozen:
        (frozen / "cgroup.procs").write_text(str(shim))
        await node.scale(0)
        await node.closed_for(f"pid {shim} (python) outlives KILL: it is left of tiny-0")
        (frozen / "freezer.state").write_text("THAWED")
        await until(lambda: not (frozen / "cgroup.procs").read_text())
    await node.opens()

"""Fleet continues as new while everybody speaks to it: no update is lost, none is done twice, everybody is answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from activities import contract
from activities.contract import Done, NameArg, ScaleArg
from fleet.state import NodeState, ReplicaState
from tests.control import Cell, control_plane
from tests.fleets import GIB, inventory
from tests.servers import own_server
from tests.waiting import until
from workflows import messages
from workflows.messages import NodeJoined, NodeMeasured

MEMBERS = 8
CONTINUATIONS = 5
EVENTS = 50
"""After which the server asks for a continue-as-new: an eightieth of the usual number."""


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    """Fleet is the only one of its workflows that ever gets so long."""
    async with own_server(limit__historyCount__suggestContinueAsNew=EVENTS) as server:
        async with control_plane(server.client) as made:
            yield made


class Runs:
    """Counts Fleet's runs while the crowd is busy."""

    def __init__(self, cell: Cell) -> None:
        self._fleet = cell.fleet
        self._seen: set[str] = set()

    @property
    def enough(self) -> bool:
        return len(self._seen) > CONTINUATIONS

    async def watch(self) -> None:
        while not self.enough:
            self._seen.add((await self._fleet.describe()).run_id)


async def test_no_update_is_lost_or_done_twice_over_many_continuations(cell: Cell) -> None:
    members = [f"m{number:02}-{cell.name}" for number in range(MEMBERS)]
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(cell.node(f"n{number}", memory=4 * GIB)) for number in range(2)]
        await asyncio.gather(*(node.join() for node in nodes), *(_introduce(cell, name) for name in members))
        runs = Runs(cell)
        jobs = [cell.run({"repo": "file:/models/m.gguf", "name": f"m{number}"}) for number in range(4)]
        results, turns, _ = await asyncio.gather(
            asyncio.gather(*jobs),
            asyncio.gather(*(_turns(cell, name, runs) for name in members)),
            runs.watch(),
        )
        assert [len(result.replicas) for result in results] == [1] * 4
        await asyncio.gather(*(_scale(cell, f"m{number}") for number in range(4)))

        async def settled() -> bool:
            replicas = (await cell.state()).replicas.values()
            return len(replicas) == 5 and all(replica.state is ReplicaState.SERVING for replica in replicas)

        await until(settled, 60.0)
        state = await cell.state()
        for name, count in zip(members, turns, strict=True):
            member = state.nodes[name]
            assert (member.state, member.inventory.cpus) == (NodeState.READY, 1 + count)
            assert member.version == 1 + 3 * count  # it counts every change, the join first
        assert [state.models[f"m{number}"].spec.replicas for number in range(4)] == [2, 1, 1, 1]
        wanted = {(replica.id, replica.generation) for replica in state.replicas.values()}
        assert {(shard.replica, shard.generation) for node in nodes for shard in node.running} == wanted


async def _introduce(cell: Cell, name: str) -> None:
    """A member that nobody attends and nothing fits on: only its record counts."""
    joined = NodeJoined(node=name, incarnation="i1", inventory=inventory(memory=0))
    await cell.fleet.signal(messages.SIGNAL_NODE_JOINED, joined)


async def _turns(cell: Cell, name: str, runs: Runs) -> int:
    """Tell a new number of CPUs, cordon and uncordon, until Fleet has had enough runs; how many times."""
    count = 0
    while not runs.enough:
        count += 1
        measured = NodeMeasured(node=name, incarnation="i1", inventory=inventory(memory=0, cpus=1 + count))
        await cell.fleet.signal(messages.SIGNAL_NODE_MEASURED, measured)
        for wish, word in ((contract.UPDATE_CORDON, "cordoned"), (contract.UPDATE_UNCORDON, "uncordoned")):
            done: Done = await cell.fleet.execute_update(wish, NameArg(name=name), result_type=Done)
            assert done.sentence == f"node {name} is {word}"
    return count


async def _scale(cell: Cell, name: str) -> None:
    """Up and down, one after the other; the first model ends with two."""
    for replicas in (0, 1, 2) if name == "m0" else (2, 0, 1):
        arg = ScaleArg(name=name, replicas=replicas)
        done: Done = await cell.fleet.execute_update(contract.UPDATE_SCALE, arg, result_type=Done)
        assert done.sentence == f"{name} is scaled to {replicas} replicas"

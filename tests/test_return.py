"""Replicas of a lost node move; when it comes back, one copy of each replica runs, at every moment after."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.node_contract import LeaseTerms
from fleet.state import NodeState, ReplicaState
from tests.control import Cell, control_plane
from tests.fleets import GIB
from tests.members import MemberNode
from tests.waiting import throughout, until

NODES = 6
AWAY = 2
TERMS = LeaseTerms(heartbeat_timeout_s=2, grace_s=1)


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client) as made:
        yield made


def copies(nodes: list[MemberNode]) -> Counter[str]:
    """How many of each replica run, wherever."""
    return Counter(shard.replica for node in nodes for shard in node.running)


async def test_one_copy_of_each_replica_runs_after_lost_nodes_return(cell: Cell, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        staying = [
            MemberNode(cell, f"n{number}", tmp_path, memory=2 * GIB, terms=TERMS) for number in range(AWAY, NODES)
        ]
        await asyncio.gather(*(stack.enter_async_context(node) for node in staying))
        async with AsyncExitStack() as away:
            gone = [MemberNode(cell, f"n{number}", tmp_path, memory=2 * GIB, terms=TERMS) for number in range(AWAY)]
            await asyncio.gather(*(away.enter_async_context(node) for node in gone))
            await until(lambda: all(node.membership.attending for node in staying + gone), 60.0)
            await cell.run({"repo": "file:/models/m.gguf", "name": "wide", "replicas": NODES})
            before = (await cell.state()).replicas
        # Cut off: their agents tell nothing more, their engines go on.
        assert all(node.running for node in gone)

        async def reaped() -> bool:
            state = await cell.state()
            lost = {node.name for node in gone}
            return {state.nodes[name].state for name in lost} == {NodeState.LOST} and all(
                replica.state is ReplicaState.SERVING and not lost & set(replica.nodes)
                for replica in state.replicas.values()
            )

        await until(reaped, 60.0)
        assert set(copies(staying).values()) == {1}
        assert set(copies(staying + gone).values()) == {1, 2}  # the lost ones answer nobody: no route leads there
        after = (await cell.state()).replicas
        moved = {name for name in before if after[name].generation > before[name].generation}
        assert moved == {shard.replica for node in gone for shard in node.running}
        returned = [MemberNode(cell, f"n{number}", tmp_path, memory=2 * GIB, terms=TERMS) for number in range(AWAY)]
        for late, early in zip(returned, gone, strict=True):
            late.running = early.running
        await asyncio.gather(*(stack.enter_async_context(node) for node in returned))

        # The moment: a node is back when it has acted on the answer to its join. No copy is lost on the way there.
        def back() -> bool:
            assert set(copies(staying + returned)) == set(before)
            return all(node.joins for node in returned)

        await until(back, 60.0)
        assert {shard.generation for node in returned for shard in node.stopped} <= {
            replica.generation for replica in before.values()
        }

        def one_of_each() -> None:
            assert copies(staying + returned) == Counter(dict.fromkeys(before, 1))

        # As long as a lease that nobody holds could still end and take replicas along.
        await throughout(TERMS.heartbeat_timeout_s + TERMS.grace_s, one_of_each)
        state = await cell.state()
        assert state.replicas == after
        assert {node.state for node in state.nodes.values()} == {NodeState.READY}
        wanted = {(replica.nodes[0], replica.id, replica.generation) for replica in after.values()}
        found = {(node.name, shard.replica, shard.generation) for node in staying + returned for shard in node.running}
        assert found == wanted

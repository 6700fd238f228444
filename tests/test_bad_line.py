"""Two hundred nodes on a line that loses almost a third of what they say: the fleet comes to rest, and rightly."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.node_contract import LeaseTerms
from fleet.state import FleetState, NodeState, Policy, ReplicaState, RestartPolicy
from tests.control import Cell, control_plane
from tests.fleets import GIB
from tests.members import BadLine, MemberNode
from tests.waiting import until

NODES = 200
REPLICAS = 100
DEATHS = 25
CRASHES = 10
TERMS = LeaseTerms(heartbeat_timeout_s=60, grace_s=60)
"""However busy this one process with all of them is, none is to be lost; a crashed agent's engines are adopted."""


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client, policy=Policy(restart=RestartPolicy(base_s=0.1))) as made:
        yield made


def at_rest(state: FleetState, nodes: list[MemberNode]) -> bool:
    """Whether the fleet's idea and the nodes' are one: every replica serves, once, where the fleet has it."""
    believed = Counter(
        (node, replica.id, replica.generation)
        for replica in state.replicas.values()
        if replica.state is ReplicaState.SERVING
        for node in replica.nodes
    )
    true = Counter((node.name, shard.replica, shard.generation) for node in nodes for shard in node.running)
    return len(state.replicas) == REPLICAS == len(believed) and believed == true


@pytest.mark.timeout(400)
async def test_two_hundred_nodes_converge_on_a_bad_line(cell: Cell, tmp_path: Path) -> None:
    line = BadLine(random.Random(11), lost=0.3)  # noqa: S311 -- the same troubles every time
    async with AsyncExitStack() as stack:

        def member(number: int) -> MemberNode:
            return MemberNode(cell, f"n{number:03}", tmp_path, memory=GIB, terms=TERMS, line=line)

        crashing = await stack.enter_async_context(AsyncExitStack())
        nodes = [member(number) for number in range(NODES)]
        await asyncio.gather(
            *((crashing if number < CRASHES else stack).enter_async_context(node) for number, node in enumerate(nodes))
        )
        await until(lambda: all(node.membership.attending for node in nodes), 120.0)
        job = {"repo": "file:/models/m.gguf", "name": "wide", "replicas": REPLICAS, "room_deadline_s": None}
        await asyncio.wait_for(cell.run(job), 120.0)
        await until(lambda: _rests(cell, nodes), 60.0)
        first = await generations(cell)

        # Engines end and agents crash while a third of what tells of it is lost.
        busy = [node for node in nodes[CRASHES:] if node.running][:DEATHS]
        assert len(busy) == DEATHS
        for node in busy:
            for shard in list(node.running):
                node.engine_ends(shard)
        crashed = nodes[:CRASHES]
        await crashing.aclose()
        nodes[:CRASHES] = later = [member(number) for number in range(CRASHES)]
        for before, after in zip(crashed, later, strict=True):
            after.running = before.running
        await asyncio.gather(*(stack.enter_async_context(node) for node in later))
        await until(lambda: all(node.membership.attending for node in nodes), 60.0)
        await until(lambda: _restarted(cell, first, DEATHS), 60.0)
        await until(lambda: _rests(cell, nodes), 60.0)

        state = await cell.state()
        assert {node.state for node in state.nodes.values()} == {NodeState.READY}
        assert line.troubles > NODES / 4
        assert sum(first[key] != replica.generation for key, replica in state.replicas.items()) == DEATHS


async def _rests(cell: Cell, nodes: list[MemberNode]) -> bool:
    return at_rest(await cell.state(), nodes)


async def generations(cell: Cell) -> dict[str, int]:
    """By replica."""
    return {key: replica.generation for key, replica in (await cell.state()).replicas.items()}


async def _restarted(cell: Cell, first: dict[str, int], count: int) -> bool:
    """Whether so many replicas are in a later generation."""
    now = await generations(cell)
    return sum(now[key] > generation for key, generation in first.items()) >= count

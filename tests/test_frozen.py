"""A Temporal server that is frozen for much longer than lease and grace: nothing is stopped, nothing is moved."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from temporalio.testing import WorkflowEnvironment

from activities import contract
from activities.node_contract import LeaseTerms
from fleet.state import NodeState, ReplicaState
from tests.control import Cell, control_plane
from tests.fleets import GIB
from tests.members import MemberNode
from tests.servers import freeze, own_server
from tests.waiting import until
from workflows import messages

AGENTS = 20
TERMS = LeaseTerms(heartbeat_timeout_s=2, grace_s=2)
FROZEN_S = 16.0
"""Four times lease and grace together: as 5 minutes would be to 75 seconds."""


@pytest.fixture(scope="module")
async def own() -> AsyncIterator[WorkflowEnvironment]:
    """Not the server that other tests use."""
    async with own_server() as server:
        yield server


@pytest.fixture
async def cell(own: WorkflowEnvironment) -> AsyncIterator[Cell]:
    async with control_plane(own.client) as made:
        yield made


async def test_twenty_agents_stop_nothing_while_temporal_is_frozen(cell: Cell, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes = [MemberNode(cell, f"n{number:02}", tmp_path, memory=GIB, terms=TERMS) for number in range(AGENTS)]
        await asyncio.gather(*(stack.enter_async_context(node) for node in nodes))
        await until(lambda: all(node.membership.attending for node in nodes), 60.0)
        await cell.run({"repo": "file:/models/m.gguf", "name": "wide", "replicas": AGENTS})
        before = await cell.state()
        running = [dict(node.running) for node in nodes]
        joins = [node.joins for node in nodes]
        with freeze(cell.client):
            await asyncio.sleep(FROZEN_S)

        # A server that wakes up finds every lease run out: each agent sees it, and joins again.
        async def back() -> bool:
            return all(
                node.joins > count and node.membership.attending for node, count in zip(nodes, joins, strict=True)
            )

        await until(back, 60.0)
        after = await cell.state()
        assert {node.state for node in after.nodes.values()} == {NodeState.READY}
        assert {key: node.incarnation for key, node in after.nodes.items()} == {
            node.name: node.incarnation for node in nodes
        }
        assert after.replicas == before.replicas
        assert after.generation == before.generation
        assert [dict(node.running) for node in nodes] == running
        assert [node.stopped + node.drained for node in nodes] == [[]] * AGENTS
        assert await _signals(cell, messages.SIGNAL_NODE_LOST) == 0


async def _signals(cell: Cell, name: str) -> int:
    """How many of these Fleet has got."""
    history = await cell.fleet.fetch_history()
    return sum(event.workflow_execution_signaled_event_attributes.signal_name == name for event in history.events)


async def test_a_grace_in_which_temporal_was_frozen_begins_anew(cell: Cell, tmp_path: Path) -> None:
    """Its agent is away already when the server freezes: it could not come back before the grace ended."""
    terms = LeaseTerms(heartbeat_timeout_s=2, grace_s=4)
    async with MemberNode(cell, "n1", tmp_path, terms=terms) as first:
        await until(lambda: first.membership.attending, 20.0)
        await cell.run({"repo": "file:/models/m.gguf", "name": "tiny"})
    handle = cell.client.get_workflow_handle(contract.node_id(first.name))

    async def in_grace() -> bool:
        history = await handle.fetch_history()
        return any(event.HasField("timer_started_event_attributes") for event in history.events)

    await until(in_grace, 20.0)
    with freeze(cell.client):
        await asyncio.sleep(12.0)  # more than grace and the tolerated lateness
    later = MemberNode(cell, "n1", tmp_path, terms=terms)
    later.running = first.running
    async with later:
        await until(lambda: later.membership.attending, 30.0)
        state = await cell.state()
        assert state.replicas["tiny-0"].generation == 1
        assert state.replicas["tiny-0"].state is ReplicaState.SERVING
        assert later.stopped == []
        assert await _signals(cell, messages.SIGNAL_NODE_LOST) == 0

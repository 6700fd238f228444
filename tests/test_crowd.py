"""Many at once, on a real server with nodes that have no engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from temporalio.client import Client

from activities.node_contract import LeaseTerms
from fleet.state import NodeState, ReplicaState
from tests.control import Cell, control_plane
from tests.fleets import GIB
from tests.waiting import until


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client) as made:
        yield made


async def test_fifty_submits_at_once_for_one_place(cell: Cell) -> None:
    async with cell.node("n1", memory=GIB) as node:
        await node.join()
        jobs = [
            cell.start({"repo": "file:/models/m.gguf", "name": f"m{number:02}", "room_deadline_s": None})
            for number in range(50)
        ]
        await asyncio.gather(*jobs)

        async def decided() -> bool:
            models = (await cell.state()).models.values()
            return len(models) == 50 and sum(bool(model.waiting) for model in models) == 49

        await until(decided, 60.0)

        async def served() -> bool:
            return any(replica.state is ReplicaState.SERVING for replica in (await cell.state()).replicas.values())

        await until(served, 20.0)
        state = await cell.state()
        assert len(state.replicas) == 1
        assert len(node.started) == 1
        expected = f"1 memory (need 1 GiB, best free 0 B on {node.name})"
        assert {model.waiting.partition(": ")[2] for model in state.models.values() if model.waiting} == {expected}


async def test_twenty_nodes_leave_and_return_and_every_replica_runs_once(cell: Cell) -> None:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(cell.node(f"n{number:02}", memory=2 * GIB)) for number in range(20)]
        await asyncio.gather(*(node.join() for node in nodes))
        await cell.run({"repo": "file:/models/m.gguf", "name": "wide", "replicas": 20})
        await asyncio.gather(*(node.leave() for node in nodes[:8]))

        async def moved() -> bool:
            state = await cell.state()
            lost = {node.name for node in nodes[:8]}
            return {state.nodes[name].state for name in lost} == {NodeState.LOST} and all(
                replica.state is ReplicaState.SERVING and not lost & set(replica.nodes)
                for replica in state.replicas.values()
            )

        await until(moved, 60.0)
        state = await cell.state()
        assert len(state.replicas) == 20
        for node in nodes[8:]:
            wanted = {(r.id, r.generation) for r in state.replicas.values() if node.name in r.nodes}
            assert {(shard.replica, shard.generation) for shard in node.running} == wanted
        answers = await asyncio.gather(*(node.join() for node in nodes[:8]))
        assert [answer.claimed for answer in answers] == [()] * 8


@pytest.mark.timeout(400)  # it takes half a minute on two idle cores, and six times that on busy ones
async def test_a_hundred_jobs_at_once_all_end_with_short_histories(cell: Cell) -> None:
    """Ten jobs on each of ten models, side by side: every one ends done, and each model is there once."""
    async with AsyncExitStack() as stack:
        terms = LeaseTerms(heartbeat_timeout_s=30, grace_s=30)  # the crowd is of jobs: no node is to be lost meanwhile
        nodes = [
            await stack.enter_async_context(cell.node(f"n{number}", memory=4 * GIB, terms=terms)) for number in range(5)
        ]
        await asyncio.gather(*(node.join() for node in nodes))
        jobs = await asyncio.gather(
            *(cell.start({"repo": "file:/models/m.gguf", "name": f"m{number % 10}"}) for number in range(100))
        )
        results = await asyncio.gather(*(job.result() for job in jobs))
        assert {result.sentence.partition(":")[0] for result in results} == {f"m{n} is serving" for n in range(10)}
        assert sum(result.sentence.endswith("nothing was to be changed") for result in results) == 90
        state = await cell.state()
        assert sorted(replica.id for replica in state.replicas.values()) == [f"m{number}-0" for number in range(10)]
        assert sum(len(node.started) for node in nodes) == 10
        lengths = [(await job.describe()).history_length for job in jobs]
        assert max(lengths) < 200, sorted(lengths)[-5:]

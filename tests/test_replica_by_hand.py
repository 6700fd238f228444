"""A replica's workflow that a person cancels: nothing of it runs any more, whenever that was, and Fleet is told."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from activities import contract
from activities.node_contract import StartShard
from fleet.reasons import Reason
from fleet.state import ReplicaState
from tests.control import Cell, control_plane
from tests.test_workflows import SERVE
from workflows.messages import ReplicaInput


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client) as made:
        yield made


async def test_one_that_serves_is_stopped_and_stays_so_until_a_retry(cell: Cell) -> None:
    async with cell.node("n1") as node:
        await node.join()
        await cell.run(SERVE)
        await cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name)).cancel()
        ended = await cell.replica("tiny-0", ReplicaState.FAILED)
        assert ended.failure is not None
        assert ended.failure.reason is Reason.STOPPED_BY_HAND
        assert ended.given_up
        assert node.running == {}
        assert len(node.started) == 1


async def test_whenever_it_is_cancelled_nothing_stays(cell: Cell) -> None:
    """Also while it tells Fleet that it starts or serves: the SDK would forget the cancellation."""

    async def soon(request: StartShard) -> None:
        await asyncio.sleep(0.05)

    async with cell.node("n1", start=soon) as node:
        await node.join()
        await cell.run(SERVE)
        first = await cell.client.get_workflow_handle(contract.replica_id("tiny-0", cell.name)).fetch_history()
        payloads = first.events[0].workflow_execution_started_event_attributes.input.payloads
        (began,) = await cell.client.data_converter.decode(payloads, [ReplicaInput])
        kept = dict(node.running)

        async def one(number: int) -> None:
            name = f"by-hand-{number}"
            assert began.start is not None
            shards = tuple(
                shard.model_copy(update={"shard": shard.shard.model_copy(update={"replica": name})})
                for shard in began.start.shards
            )
            handle = await cell.client.start_workflow(
                contract.REPLICA_WORKFLOW,
                began.model_copy(update={"replica": name, "start": began.start.model_copy(update={"shards": shards})}),
                id=contract.replica_id(name, cell.name),
                task_queue=contract.CONTROL_QUEUE,
            )
            # The moments fall where they may: a life to the first "it serves" takes some 0.3 s.
            await asyncio.sleep(number * 0.005)
            await handle.cancel()
            with pytest.raises(WorkflowFailureError) as caught:
                await asyncio.wait_for(handle.result(), 60.0)
            assert isinstance(caught.value.cause, CancelledError), number

        for first_of in range(0, 100, 20):
            await asyncio.gather(*(one(number) for number in range(first_of, first_of + 20)))
        assert node.running == kept

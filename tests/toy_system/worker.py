"""A toy control plane for the tests of `ctl up`: a Fleet that believes every node that says it joined.

A file `worker.dies` beside server.yaml makes it die once its Fleet answers.
"""

import argparse
import asyncio
import signal
from pathlib import Path

from temporalio import workflow
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.contract import (
    CONTROL_QUEUE,
    FLEET_WORKFLOW,
    QUERY_SNAPSHOT,
    Snapshot,
    fleet_id,
)
from fleet.state import FleetState, Inventory, NodeRecord, NodeState
from runtime.temporal import connect


@workflow.defn(name=FLEET_WORKFLOW)
class ToyFleet:
    def __init__(self) -> None:
        self._nodes: dict[str, NodeRecord] = {}

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal
    def joined(self, node: str, incarnation: str) -> None:
        record = NodeRecord(
            id=node,
            state=NodeState.READY,
            incarnation=incarnation,
            inventory=Inventory(address="127.0.0.1", devices=()),
            since=1.0,
        )
        self._nodes[node] = record

    @workflow.query(name=QUERY_SNAPSHOT)
    def snapshot(self) -> Snapshot:
        return Snapshot(state=FleetState(nodes=self._nodes))


async def main(arguments: argparse.Namespace) -> None:
    client = await connect()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Worker(
        client, task_queue=CONTROL_QUEUE, workflows=[ToyFleet], workflow_runner=UnsandboxedWorkflowRunner()
    ):
        await client.start_workflow(
            FLEET_WORKFLOW,
            id=fleet_id("main"),
            task_queue=CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        if arguments.config.with_name("worker.dies").exists():
            raise SystemExit("worker: lost its mind")
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    asyncio.run(main(parser.parse_args()))

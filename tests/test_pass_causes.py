"""What came between a pass's start and its look at the fleet is among its causes: its plan may rest on it."""

import uuid

from temporalio import workflow
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities import contract
from activities.contract import CommitRequest, CommitResult, PlaceRequest, Snapshot
from activities.place import Place
from fleet.steps import Cause, StepKind
from tests.fleets import GIB, fleet, inventory, spec

LATER = Cause(sentence="node n2 is lost: its agent is silent", trace=f"00-{'ab' * 16}-{'cd' * 8}-01")


@workflow.defn(name=contract.FLEET_WORKFLOW, sandboxed=False)
class TinyFleet:
    """Something came, and its own pass is yet to run."""

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query(name=contract.QUERY_SNAPSHOT)
    def snapshot(self) -> Snapshot:
        return Snapshot(state=fleet({"n1": inventory(memory=2 * GIB)}, spec("m")), causes=(LATER,))

    @workflow.update(name=contract.UPDATE_COMMIT)
    def commit(self, request: CommitRequest) -> CommitResult:
        return CommitResult(accepted=True)


async def test_a_pass_is_told_what_its_plan_rests_on(client: Client) -> None:
    cell, queue = f"c{uuid.uuid4().hex[:8]}", f"tiny-{uuid.uuid4().hex[:8]}"
    async with Worker(client, task_queue=queue, workflows=[TinyFleet], workflow_runner=UnsandboxedWorkflowRunner()):
        handle = await client.start_workflow(TinyFleet.run, id=contract.fleet_id(cell), task_queue=queue)
        try:
            request = PlaceRequest(cell=cell, pass_id="a pass", now=10.0)
            plan = await ActivityEnvironment().run(Place(client).place, request)
        finally:
            await handle.terminate()
    assert [step.kind for step in plan.steps] == [StepKind.SCALE_UP]
    assert plan.causes == (LATER,)

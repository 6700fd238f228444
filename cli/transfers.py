"""How far the mirror step of a running job is, read off the heartbeats of its transfer."""

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionDescription
from temporalio.service import RPCError

from activities.contract import MIRROR_MODEL, JobStatus, StepState
from cli.session import QUERY_TIMEOUT
from fleet.progress import Progress


async def with_progress(
    client: Client, status: JobStatus, described: WorkflowExecutionDescription | None = None
) -> JobStatus:
    """The status with how far its mirror step is; as it was where nothing is transferred, or nothing was said yet."""
    if not any(step.name == "mirror" and step.state is StepState.RUNNING for step in status.steps):
        return status
    if described is None:
        try:
            described = await client.get_workflow_handle(status.job).describe(rpc_timeout=QUERY_TIMEOUT)
        except RPCError:
            return status  # it goes on without us, and the next look asks again
    for pending in described.raw_description.pending_activities:
        if pending.activity_type.name == MIRROR_MODEL:
            said = await _said(client, pending)
            steps = [
                step.model_copy(update={"progress": said}) if step.name == "mirror" else step for step in status.steps
            ]
            return status.model_copy(update={"steps": tuple(steps)})
    return status


async def _said(client: Client, pending: PendingActivityInfo) -> str:
    if not pending.heartbeat_details.payloads:
        return ""
    values = await client.data_converter.decode(pending.heartbeat_details.payloads, [Progress])
    return values[0].said if isinstance(values[0], Progress) else ""

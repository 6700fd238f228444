"""How far the step of a running job is, read off its activity: what its heartbeats say, and why it is tried again."""

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionDescription
from temporalio.service import RPCError

from activities.contract import CHECK_FIT, MIRROR_MODEL, RESOLVE_MODEL, SMOKE_TEST, JobStatus, StepState
from activities.node_contract import PREFLIGHT
from cli.session import QUERY_TIMEOUT
from fleet.progress import Progress

STEPS = {
    RESOLVE_MODEL: "registry",
    MIRROR_MODEL: "mirror",
    CHECK_FIT: "check",
    PREFLIGHT: "check",
    SMOKE_TEST: "smoke test",
}
"""The steps that are activities of the job itself; what a placement waits for is told by Fleet."""


async def with_progress(
    client: Client, status: JobStatus, described: WorkflowExecutionDescription | None = None
) -> JobStatus:
    """The status with how far its running step is; as it was where that step has nothing to say, or not yet."""
    running = {step.name for step in status.steps if step.state is StepState.RUNNING}
    if running.isdisjoint(STEPS.values()):
        return status
    if described is None:
        try:
            described = await client.get_workflow_handle(status.job).describe(rpc_timeout=QUERY_TIMEOUT)
        except RPCError:
            return status  # it goes on without us, and the next look asks again
    for pending in described.raw_description.pending_activities:
        name = STEPS.get(pending.activity_type.name)
        if name in running:
            said = "; ".join(filter(None, (await _said(client, pending), again(pending))))
            steps = [step.model_copy(update={"progress": said}) if step.name == name else step for step in status.steps]
            return status.model_copy(update={"steps": tuple(steps)})
    return status


def again(pending: PendingActivityInfo) -> str:
    """`attempt 2 of 6, as the one before failed: …`; "" for a first attempt."""
    if pending.attempt < 2 or not pending.HasField("last_failure"):
        return ""
    of = f" of {pending.maximum_attempts}" if pending.maximum_attempts else ""
    lost = pending.last_failure.HasField("timeout_failure_info")
    why = "it was heard of no more" if lost else pending.last_failure.message
    return f"attempt {pending.attempt}{of}, as the one before failed: {why}"


async def _said(client: Client, pending: PendingActivityInfo) -> str:
    if not pending.heartbeat_details.payloads:
        return ""
    values = await client.data_converter.decode(pending.heartbeat_details.payloads, [Progress])
    return values[0].said if isinstance(values[0], Progress) else ""

"""What every update sent gets without asking: it is sent again when Temporal could not hand it to its workflow.

A workflow that continues as new just when a signal arrives makes Temporal drop the updates of that moment, undone, and
answer their callers with an error ("unexpected workflow task failure"). Sent again under the same id, an update
reaches the next run, and is never done twice.
"""

import asyncio
import dataclasses
import uuid
from typing import Any

from temporalio.api.errordetails.v1 import WorkflowNotReadyFailure
from temporalio.client import Interceptor, OutboundInterceptor, StartWorkflowUpdateInput, WorkflowUpdateHandle
from temporalio.service import RPCError

AGAIN_S, AGAIN_CAP_S = 0.1, 1.0
ATTEMPTS = 10
"""About 6 s in all. The moment lasts some ten milliseconds; a workflow that is stuck is told of soon enough."""


class UpdateInterceptor(Interceptor):
    """On every client, through the plugin."""

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _Outbound(next)


class _Outbound(OutboundInterceptor):
    async def start_workflow_update(self, input: StartWorkflowUpdateInput) -> WorkflowUpdateHandle[Any]:
        named = dataclasses.replace(input, update_id=input.update_id or str(uuid.uuid4()))
        wait = AGAIN_S
        for _ in range(ATTEMPTS - 1):
            try:
                return await super().start_workflow_update(named)
            except RPCError as error:
                if not not_ready(error):
                    raise
            await asyncio.sleep(wait)
            wait = min(AGAIN_CAP_S, wait * 2)
        return await super().start_workflow_update(named)


def not_ready(error: RPCError) -> bool:
    """Whether the workflow could not take it just then."""
    kind = WorkflowNotReadyFailure.DESCRIPTOR
    return any(detail.Is(kind) for detail in error.grpc_status.details)

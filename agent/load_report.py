"""Tells the fleet the node's loads, beside its other reports: one that is lost is dropped, and newer numbers follow."""

import asyncio
import logging
import time
from datetime import timedelta

from temporalio.client import Client, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError

from activities.contract import node_id
from activities.node_contract import REPORT, Report, Reported
from agent.loads import Loads
from fleet.facts import Load

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""By then there are newer numbers to tell."""


class LoadReport:
    """At most one report of loads is under way; a change of a shard never waits for it."""

    def __init__(self, node: str, incarnation: str, loads: Loads, *, timeout_s: float = TIMEOUT_S) -> None:
        self._node = node
        self._incarnation = incarnation
        self._loads = loads
        self._timeout_s = timeout_s
        self._sent = 0
        self._unanswered = ""
        self._task: asyncio.Task[None] | None = None

    def begin(self, client: Client) -> None:
        """Send what is due, if nothing is under way."""
        loads = self._loads.due(time.monotonic())
        if loads and (self._task is None or self._task.done()):
            self._loads.tried(time.monotonic())
            self._task = asyncio.create_task(self._send(client, loads), name="report loads")

    async def close(self) -> None:
        """Drop what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send(self, client: Client, loads: tuple[Load, ...]) -> None:
        # Without a worker the server keeps an update that nobody waits for any more, and takes ten at a time. Under
        # the id of the one without an answer at most one is kept, and the reports of exits find room.
        repeated = bool(self._unanswered)
        if not repeated:
            self._sent += 1
            self._unanswered = f"loads/{self._incarnation}/{self._sent}"
        try:
            await client.get_workflow_handle(node_id(self._node)).execute_update(
                REPORT,
                Report(node=self._node, incarnation=self._incarnation, loads=loads),
                id=self._unanswered,
                result_type=Reported,
                rpc_timeout=timedelta(seconds=self._timeout_s),
            )
        except WorkflowUpdateFailedError as error:
            self._unanswered = ""
            logger.debug("the fleet does not take loads: %s", error.__cause__ or error)
            return
        except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            logger.debug("loads are lost: %s", error)
            return
        self._unanswered = ""
        if not repeated:  # else it may be the older numbers that were taken: these are told with the next report
            self._loads.taken(loads, time.monotonic())

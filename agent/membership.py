"""The node's membership of the fleet: join, hold the lease, report, leave; joined again whenever the lease is lost."""

import asyncio
import contextlib
import hashlib
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

from temporalio import activity
from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import CONTROL_QUEUE, node_id
from activities.node_contract import (
    ATTEND,
    JOIN,
    LEAVE,
    NODE_WORKFLOW,
    REPORT,
    STALE_INCARNATION,
    AttendRequest,
    JoinAnswer,
    JoinRequest,
    LeaseTerms,
    Leave,
    NodeInput,
    Report,
    Reported,
    RunningShard,
    ShardChange,
)
from agent.inventory import notable
from agent.ledger import Ledger
from agent.load_report import LoadReport
from agent.outbox import Outbox
from fleet.state import Inventory
from runtime.config import AgentConfig

logger = logging.getLogger(__name__)

BEAT_S = 1.0
UPDATE_TIMEOUT_S = 20.0
"""One look for an answer; the next one asks for the same update again, so nothing is done twice."""
LEASE_WAIT_S = 15.0
"""From a join to the lease's activity: a worker that was killed costs up to five seconds of it."""
MEASURE_S = 30.0
"""Placement needs no finer picture of foreign memory and disk."""
BACKOFF_S = 0.5
BACKOFF_CAP_S = 5.0
LEAVE_TIMEOUT_S = 5.0
TASK_TIMEOUT = timedelta(seconds=5)


Adopt = Callable[[tuple[RunningShard, ...], JoinAnswer], Awaitable[None]]
"""Told what ran when we joined and what the fleet answered; ends what it does not claim."""


class Membership:
    """The one caller of this node's workflow."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        outbox: Outbox,
        *,
        ledger: Ledger,
        measure: Callable[[], Inventory],
        running: Callable[[], tuple[RunningShard, ...]],
        adopt: Adopt,
        reported: Callable[[ShardChange], None],
    ) -> None:
        """`reported` is told each change that was taken."""
        self._config = config
        self._incarnation = incarnation
        self._outbox = outbox
        self._load_report = LoadReport(config.node, incarnation, outbox.loads)
        self._ledger = ledger
        self._measure = measure
        self._running = running
        self._adopt = adopt
        self._reported = reported
        self._inventory: Inventory | None = None
        self._measured_at = 0.0
        self._must_join = True
        self._joined_at = 0.0
        self._joins = 0
        self._lost_lease = False
        """Since the last join that was answered."""
        self._attending: set[int] = set()
        self._attends = 0
        self._updates = 0
        # What was sent and not yet answered, with its id: asking again with the same id does nothing twice.
        self._join_sent: tuple[str, JoinRequest] | None = None
        self._report_sent: tuple[str, Report] | None = None
        self._trouble = ""
        self._machine = machine_id(config.data)

    @activity.defn(name=ATTEND)
    async def attend(self, request: AttendRequest) -> None:
        """The lease: it is held as long as this activity runs. Ends with the agent, or when the lease is closed."""
        number = self._attends = self._attends + 1
        join = self._joins
        self._attending.add(number)
        logger.info("lease held incarnation=%s", request.incarnation)
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(BEAT_S)
        except asyncio.CancelledError:
            if activity.is_worker_shutdown():
                return
            logger.warning("lease closed incarnation=%s", request.incarnation)
            if join == self._joins:  # otherwise a later join has replaced it already
                self._lost_lease = True
                self.rejoin()
            raise
        finally:
            self._attending.discard(number)

    @property
    def attending(self) -> int:
        """Leases held now: one, or two for the moment in which a join replaces another."""
        return len(self._attending)

    def rejoin(self) -> None:
        """Join again soon: the fleet's idea of this node may be wrong."""
        self._must_join = True
        self._outbox.filled.set()

    def measure_again(self) -> None:
        """Measure soon, not at the next interval: something changed that placement must know."""
        self._measured_at = 0.0
        self._outbox.filled.set()

    async def run(self, client: Client) -> None:
        """Be a member until cancelled. Whatever goes wrong between us and Temporal is tried again."""
        try:
            await self._run(client)
        finally:
            await self._load_report.close()

    async def leave(self, client: Client) -> None:
        """Tell the fleet that this node goes on purpose; given up on after a few seconds."""
        handle = client.get_workflow_handle(node_id(self._config.node))
        leave = Leave(node=self._config.node, incarnation=self._incarnation)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await handle.execute_update(LEAVE, leave, id=f"leave/{self._incarnation}")
        except (RPCError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError, TimeoutError) as error:
            logger.warning("could not say goodbye to the fleet: %s", _cause(error))

    async def _run(self, client: Client) -> None:
        wait = BACKOFF_S
        while True:
            self._outbox.filled.clear()
            try:
                if self._must_join or self._lease_missing():
                    await self._join(client)
                if not self._must_join:
                    self._load_report.begin(client)
                await self._report(client)
            except (
                RPCError,
                WorkflowUpdateFailedError,
                WorkflowUpdateRPCTimeoutOrCancelledError,
                TimeoutError,
            ) as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # the SDK shows a cancelled call as an error of its own
                    raise asyncio.CancelledError from error
                self._say_trouble(error)
                if wait > BACKOFF_S or not _means_join(error):  # a closed lease is taken up again at once
                    await asyncio.sleep(wait * random.uniform(0.75, 1.25))  # noqa: S311 -- spreads nodes, hides nothing
                wait = min(wait * 2, BACKOFF_CAP_S)
                continue
            wait = BACKOFF_S
            if self._trouble:
                logger.info("the fleet answers again")
                self._trouble = ""
            await self._next_reason()

    async def _join(self, client: Client) -> None:
        if self._join_sent is None:
            inventory = await asyncio.to_thread(self._measure)
            fresh = JoinRequest(
                node=self._config.node,
                incarnation=self._incarnation,
                inventory=inventory,
                shards=self._running(),
                changes=self._outbox.pending(),
                machine=self._machine,
                highest_generation=self._ledger.highest_generation(),
                cell=self._config.cell,
                terms=self._terms(),
            )
            self._join_sent = self._next_id(JOIN), fresh
        update_id, request = self._join_sent
        operation = self._start_operation()
        self._must_join = False
        self._joins += 1
        try:
            answer: JoinAnswer = await client.execute_update_with_start_workflow(
                JOIN,
                request,
                id=update_id,
                start_workflow_operation=operation,
                result_type=JoinAnswer,
                rpc_timeout=timedelta(seconds=UPDATE_TIMEOUT_S),
            )
        except BaseException as error:
            self._must_join = True
            if _answered(error):
                self._join_sent = None
            if isinstance(error, (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError)):
                with contextlib.suppress(RPCError, asyncio.CancelledError):
                    await operation.workflow_handle()  # it holds the same error and wants to be asked for it
            raise
        self._join_sent = None
        # Where the join came to the node's workflow together with the end of the lease, it does not know of that end.
        answer = answer.model_copy(update={"returned": answer.returned or self._lost_lease})
        self._lost_lease = False
        self._joined_at = time.monotonic()
        self._inventory, self._measured_at = request.inventory, time.monotonic()
        logger.info("joined the fleet: %d running, %d claimed", len(request.shards), len(answer.claimed))
        self._outbox.loads.pace(answer.loads_gap_s)
        self._outbox.loads.unsure({shard.shard.replica for shard in request.shards})
        await self._adopt(request.shards, answer)

    def _terms(self) -> LeaseTerms:
        lease = self._config.lease
        return LeaseTerms(heartbeat_timeout_s=lease.heartbeat_timeout_s, grace_s=lease.grace_s)

    def _start_operation(self) -> WithStartWorkflowOperation[object, object]:
        return WithStartWorkflowOperation(
            NODE_WORKFLOW,
            NodeInput(node=self._config.node, cell=self._config.cell, terms=self._terms()),
            id=node_id(self._config.node),
            task_queue=CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            task_timeout=TASK_TIMEOUT,
        )

    async def _report(self, client: Client) -> None:
        if self._report_sent is None:
            inventory = await self._changed_inventory()
            changes = self._outbox.pending()
            if self._must_join or not (changes or inventory):
                return
            fresh = Report(node=self._config.node, incarnation=self._incarnation, changes=changes, inventory=inventory)
            self._report_sent = self._next_id(REPORT), fresh
        update_id, report = self._report_sent
        handle = client.get_workflow_handle(node_id(self._config.node))
        try:
            await handle.execute_update(
                REPORT, report, id=update_id, result_type=Reported, rpc_timeout=timedelta(seconds=UPDATE_TIMEOUT_S)
            )
        except (WorkflowUpdateFailedError, RPCError) as error:
            if _answered(error):
                self._report_sent = None
            if _means_join(error):
                self._must_join = True
            raise
        self._report_sent = None
        if report.inventory is not None:
            self._inventory = report.inventory
        self._outbox.taken(report.changes)
        for change in report.changes:
            self._reported(change)
        if self._outbox.pending():
            self._outbox.filled.set()

    def _next_id(self, update: str) -> str:
        self._updates += 1
        return f"{update}/{self._incarnation}/{self._updates}"

    async def _changed_inventory(self) -> Inventory | None:
        if time.monotonic() - self._measured_at < MEASURE_S:
            return None
        self._measured_at = time.monotonic()
        now = await asyncio.to_thread(self._measure)
        return now if self._inventory is None or notable(self._inventory, now) else None

    def _lease_missing(self) -> bool:
        return not self._attending and time.monotonic() - self._joined_at > LEASE_WAIT_S

    async def _next_reason(self) -> None:
        """Wait for a change, the next measurement, or the time by which the lease must be held."""
        due = self._measured_at + MEASURE_S
        if not self._attending:
            due = min(due, self._joined_at + LEASE_WAIT_S)
        try:
            async with asyncio.timeout(max(0.05, due - time.monotonic() + 0.05)):
                await self._outbox.filled.wait()
        except TimeoutError:
            return

    def _say_trouble(self, error: BaseException) -> None:
        """One line each time the trouble changes, not one per attempt."""
        text = _cause(error)
        if text != self._trouble:
            logger.warning("the fleet does not answer, engines stay as they are: %s", text)
            self._trouble = text


def machine_id(data: Path) -> str:
    """Tells this node from any other that was given the same name: this machine, and where the node keeps its data."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = socket.gethostname()
    return hashlib.sha256(f"{machine}/{data.resolve()}".encode()).hexdigest()[:16]


def _answered(error: BaseException) -> bool:
    """Whether the update is over: it failed, or there is no such workflow."""
    if isinstance(error, RPCError):
        return error.status in (RPCStatusCode.NOT_FOUND, RPCStatusCode.INVALID_ARGUMENT)
    return isinstance(error, WorkflowUpdateFailedError)


def _means_join(error: BaseException) -> bool:
    if isinstance(error, RPCError):
        return error.status is RPCStatusCode.NOT_FOUND
    cause = error.__cause__
    return isinstance(cause, ApplicationError) and cause.type == STALE_INCARNATION


def _cause(error: BaseException) -> str:
    if isinstance(error, (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError)):
        return "no answer in time; is a control worker (worker.py) running?"
    return str(error.__cause__ or error)

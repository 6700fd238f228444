"""A node's door into Temporal, and its lease: one heartbeating activity for as long as its agent lives."""

import asyncio

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError

from activities import contract, node_contract
from activities.contract import fleet_id, replica_id
from activities.node_contract import (
    AttendRequest,
    JoinAnswer,
    JoinRequest,
    Leave,
    NodeInput,
    Rejoin,
    Report,
    Reported,
    ShardChange,
    ShardHealth,
    ShardRef,
)
from fleet.facts import ReplicaEvent
from fleet.measures import contradiction
from fleet.reasons import Failure, Reason
from fleet.state import ReplicaState
from workflows import calls, messages, signals
from workflows.failures import failed
from workflows.messages import Claim, NodeJoined, NodeLoads, NodeLost, NodeMeasured, ShardNews, Welcome
from workflows.spans import fail, span

NODE = SearchAttributeKey.for_keyword(contract.SEARCH_NODE)
STATE = SearchAttributeKey.for_keyword(contract.SEARCH_STATE)

FLEET_WAIT_S = 20.0
"""How long a join waits for Fleet before the agent is told to try again."""

LATE_S = 5.0
"""More than a busy server or worker delays a timer; a server that was frozen or restarted is away for longer."""

GRACE_ANEW = "grace-anew"
"""Patch: a grace in which nobody could be heard does not count."""

LEFT = "left"
"""Patch: an agent that has left wants no lease, neither of this run nor of the next. One that left before its lease
was open was told lost without end, and one that left as a run ended was taken for silent."""

READY_STATES = (ReplicaState.SERVING, ReplicaState.DRAINING, ReplicaState.DRAINED)
"""States in which a claimed shard must run; before them its start is still under way and sees to it itself."""


@workflow.defn(name=node_contract.NODE_WORKFLOW)
class Node:
    """`node/<id>`, started by the agent's first join."""

    @workflow.init
    def __init__(self, input: NodeInput) -> None:
        self._input = input
        self._node = input.node
        self._incarnation = input.incarnation
        self._machine = input.machine
        self._held = False
        """Whether somebody attends the lease."""
        self._wanted = input.wanted
        """A join was answered; its lease is to be opened."""
        self._left = False
        self._alone_ns: int | None = None
        """When the last lease ended."""
        self._reopen = False
        self._welcomes: dict[str, Welcome] = {}

    @workflow.run
    async def run(self, input: NodeInput) -> None:
        """Hold the lease, let agents come back within the grace, and tell Fleet when none does."""
        workflow.upsert_search_attributes([NODE.value_set(self._node)])
        while True:
            cause = await self._wait_for_agent()
            if cause:
                # A join that is being answered comes first: its agent lives.
                await workflow.wait_condition(lambda: self._wanted or workflow.all_handlers_finished())
                if self._wanted and not self._left:
                    continue
                await self._tell_lost(cause, left=self._left)
                await workflow.wait_condition(workflow.all_handlers_finished)
                if not self._wanted:
                    return
                continue
            await self._attend()
            if workflow.info().is_continue_as_new_suggested() and not (self._left and workflow.patched(LEFT)):
                await self._renew()

    async def _wait_for_agent(self) -> str:
        """Until a lease is to be opened (""), or nobody comes any more (why)."""
        if self._left:
            return "its agent left"
        if self._wanted:
            return ""
        if self._incarnation:
            self._show("away", f"its agent is silent; it is lost after {self._input.terms.grace_s:g} s")
        # Without any agent yet there is a join under way: this workflow was started by it.
        grace = self._input.terms.grace_s + (0.0 if self._incarnation else FLEET_WAIT_S * 2)
        while True:
            due = workflow.time() + grace
            try:
                await workflow.wait_condition(
                    lambda: self._wanted or self._left, timeout=grace, timeout_summary="grace for the agent's return"
                )
            except TimeoutError:
                # A grace that ends much too late shows that Temporal or every worker was away, and no agent could
                # have come back in that time: it begins anew.
                if workflow.time() > due + LATE_S and workflow.patched(GRACE_ANEW):
                    continue
                return "its agent is silent"
            return "its agent left" if self._left else ""

    async def _attend(self) -> None:
        """Hold the lease until it ends by itself, another agent process takes over, or this one leaves."""
        self._wanted = False
        incarnation = self._incarnation
        self._held = True
        self._show("ready", "its agent attends")
        lease = asyncio.create_task(
            calls.attend(AttendRequest(node=self._node, incarnation=incarnation), self._input.terms)
        )
        await workflow.wait_condition(
            lambda: (
                lease.done()
                or self._wanted
                or self._left
                or self._reopen
                or workflow.info().is_continue_as_new_suggested()
            )
        )
        self._reopen = False
        lease.cancel()
        await asyncio.gather(lease, return_exceptions=True)  # how it ended makes no difference: it is closed
        self._held = False
        self._alone_ns = workflow.time_ns()

    async def _renew(self) -> None:
        # A node reports for as long as its agent lives, and a run takes 2,000 updates at most. The new run opens the
        # lease of the same agent at once; should the agent see the old one closed first, it joins again by itself.
        await workflow.wait_condition(workflow.all_handlers_finished)
        again = {"incarnation": self._incarnation, "machine": self._machine, "wanted": not self._left}
        workflow.continue_as_new(self._input.model_copy(update=again))

    async def _tell_lost(self, cause: str, *, left: bool) -> None:
        self._show("lost", cause)
        if not self._incarnation:
            return
        lost = NodeLost(node=self._node, incarnation=self._incarnation, cause=cause, left=left)
        attributes = {"llmgw.node": self._node, "llmgw.detail": cause}
        # The pass that takes its replicas elsewhere links to it.
        with span("node left" if left else "node lost", attributes, start_ns=self._alone_ns, root=True) as losing:
            if not left:
                fail(losing, Failure(reason=Reason.NODE_LOST, detail=cause, node=self._node))
            await signals.tell_surely(fleet_id(self._input.cell), messages.SIGNAL_NODE_LOST, lost)

    # -- the agent's calls --------------------------------------------------------------------------------------------

    @workflow.update(name=node_contract.JOIN)
    async def join(self, request: JoinRequest) -> JoinAnswer:
        """Take an agent process in; answers with what Fleet wants of what runs there."""
        joined = NodeJoined(
            node=self._node,
            incarnation=request.incarnation,
            inventory=request.inventory,
            highest_generation=request.highest_generation,
        )
        self._welcomes.pop(request.incarnation, None)
        update = {"cell": request.cell or self._input.cell, "terms": request.terms or self._input.terms}
        self._input = self._input.model_copy(update=update)
        fleet = fleet_id(self._input.cell)
        told = await signals.tell_surely(fleet, messages.SIGNAL_NODE_JOINED, joined, give_up_after_s=FLEET_WAIT_S)
        if not told:
            raise failed(Failure(reason=Reason.INTERNAL, detail=f"{fleet} does not run: start worker.py"))
        try:
            await workflow.wait_condition(
                lambda: request.incarnation in self._welcomes,
                timeout=FLEET_WAIT_S,
                timeout_summary="Fleet's answer to a join",
            )
        except TimeoutError as error:
            raise failed(Failure(reason=Reason.INTERNAL, detail=f"{fleet} did not answer the join")) from error
        welcome = self._welcomes.pop(request.incarnation)
        # No await from here to the answer: between two agents' joins the later one holds the node.
        returned = request.incarnation != self._incarnation or not (self._held or self._wanted)
        self._incarnation, self._machine, self._left = request.incarnation, request.machine, False
        self._wanted = True
        running = {shard.shard for shard in request.shards}
        claimed = tuple(claim.shard for claim in welcome.claims if claim.shard in running)
        missing = [claim for claim in welcome.claims if claim.shard not in running]
        ended = {change.shard: change for change in request.changes if change.health is ShardHealth.EXITED}
        await self._tell_missing(missing, ended)
        return JoinAnswer(claimed=claimed, returned=returned, loads_gap_s=welcome.loads_gap_s)

    @join.validator
    def _check_join(self, request: JoinRequest) -> None:
        if request.node != self._node:
            raise ApplicationError(f"this is node {self._node}, not {request.node}", type=Reason.BAD_INPUT.value)
        fault = contradiction(request.inventory)
        if fault:
            raise ApplicationError(f"node {self._node} may not join: {fault}", type=Reason.BAD_INPUT.value)
        if self._held and request.machine != self._machine:
            raise ApplicationError(
                f"node {self._node} is held by another machine's agent: give this node another name in its agent.yaml",
                type=node_contract.NAME_TAKEN,
                non_retryable=True,
            )

    @workflow.update(name=node_contract.REPORT)
    async def report(self, report: Report) -> Reported:
        """Pass on what changed on the node."""
        if report.inventory is not None and (fault := contradiction(report.inventory)):
            # Refusing the report would keep back for ever what else it says.
            workflow.logger.warning("node %s measured itself, which is not believed: %s", self._node, fault)
        elif report.inventory is not None:
            measured = NodeMeasured(node=self._node, incarnation=report.incarnation, inventory=report.inventory)
            await signals.tell_surely(fleet_id(self._input.cell), messages.SIGNAL_NODE_MEASURED, measured)
        if report.loads:
            loads = NodeLoads(node=self._node, incarnation=report.incarnation, loads=report.loads)
            await signals.tell(fleet_id(self._input.cell), messages.SIGNAL_NODE_LOADS, loads)
        for change in report.changes:
            await self._pass_on(change)
        return Reported()

    @report.validator
    def _check_report(self, report: Report) -> None:
        self._refuse_stale(report.incarnation)

    @workflow.update(name=node_contract.LEAVE)
    def leave(self, leave: Leave) -> Reported:
        """The agent goes away and stops its engines."""
        self._left = True
        if self._wanted and workflow.patched(LEFT):
            self._wanted = False
        return Reported()

    @leave.validator
    def _check_leave(self, leave: Leave) -> None:
        self._refuse_stale(leave.incarnation)

    @workflow.signal(name=node_contract.SIGNAL_REJOIN)
    def rejoin(self, rejoin: Rejoin) -> None:
        """Close the lease: the agent sees it, and joins a Fleet that knows nothing of it."""
        self._reopen = self._reopen or (self._held and rejoin.cell == self._input.cell)

    @workflow.signal(name=messages.SIGNAL_WELCOME)
    def welcome(self, welcome: Welcome) -> None:
        """Fleet's answer to a join."""
        self._welcomes[welcome.incarnation] = welcome

    # -- small things -------------------------------------------------------------------------------------------------

    def _refuse_stale(self, incarnation: str) -> None:
        if incarnation != self._incarnation or not (self._held or self._wanted):
            raise ApplicationError(
                f"node {self._node} is not held by this agent process: join again",
                type=node_contract.STALE_INCARNATION,
                non_retryable=True,
            )

    async def _tell_missing(self, claims: list[Claim], ended: dict[ShardRef, ShardChange]) -> None:
        """What should run and does not: a reboot, or an engine that died while nobody looked; `ended` says why."""
        for claim in claims:
            if claim.state in READY_STATES:
                failure = Failure(
                    reason=Reason.ENGINE_GONE, detail="it does not run any more on the returning node", node=self._node
                )
                unseen = ShardChange(shard=claim.shard, health=ShardHealth.EXITED, failure=failure)
                await self._pass_on(ended.get(claim.shard, unseen))

    async def _pass_on(self, change: ShardChange) -> None:
        replica = replica_id(change.shard.replica, self._input.cell)
        if await signals.tell(replica, messages.SIGNAL_SHARD_CHANGED, ShardNews(change=change)):
            return
        if change.health is not ShardHealth.EXITED:
            return  # it still runs and holds its memory; a worker's round finds that its workflow is gone
        # Its workflow is gone (somebody terminated it): Fleet hears of the end directly.
        event = ReplicaEvent(
            replica=change.shard.replica,
            generation=change.shard.generation,
            state=ReplicaState.FAILED,
            failure=change.failure,
        )
        await signals.tell_fleet(self._input.cell, event)

    def _show(self, state: str, detail: str) -> None:
        workflow.upsert_search_attributes([STATE.value_set(state)])
        workflow.set_current_details(f"node **{self._node}** is {state}: {detail}")

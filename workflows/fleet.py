"""The one writer of desired and observed state: takes facts and wishes, starts passes, tells who waits.

Every handler is one step of the state without an await, so no lock is needed. What must be sent waits in the outbox
and is sent by one coroutine, in order; passes are run by another, one at a time.
"""

import asyncio
from collections import deque
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

from activities import contract, node_contract
from activities.contract import (
    CommitRequest,
    CommitResult,
    ConfigureArg,
    Deserted,
    Done,
    JobEnded,
    NameArg,
    Orphan,
    Routes,
    Snapshot,
    node_id,
    reconcile_id,
)
from activities.node_contract import Rejoin, ShardRef
from fleet import commits, facts, standing, wishes
from fleet.demand import loads_gap_s, target
from fleet.facts import ReplicaEvent
from fleet.planning import came_due, next_deadline, next_pass
from fleet.reasons import Failure, Reason, RefusedError
from fleet.render import forced_sentence
from fleet.state import Decision, FleetState, ModelRecord, ReplicaRecord
from fleet.steps import Cause
from workflows import calls, messages, signals
from workflows.failures import failed
from workflows.fleet_jobs import FleetJobs
from workflows.messages import (
    Ask,
    Claim,
    FleetInput,
    Message,
    NodeJoined,
    NodeLoads,
    NodeLost,
    NodeMeasured,
    ReconcileInput,
    Welcome,
)
from workflows.model_status import routes
from workflows.people import WISHES, Nothing, Wish
from workflows.spans import traceparent

CAUSES_KEPT = 16
"""A pass links to at most so many causes; a fleet that starts up has hundreds, and nobody reads them."""

PASS_RETRY_S = 5.0
"""After a pass that failed, or while somebody's own pass runs: soon, but no storm."""


@workflow.defn(name=contract.FLEET_WORKFLOW)
class Fleet:
    """`fleet/<cell>`."""

    @workflow.init
    def __init__(self, input: FleetInput | None = None) -> None:
        start = input or FleetInput()
        self._cell = start.cell
        self._state = start.state.model_copy(update={"cell": start.cell})
        self._outbox = deque(start.outbox)
        self._jobs = FleetJobs(start.watchers, start.queues)
        self._causes: list[Cause] = list(start.causes)
        self._committed_by = start.committed_by
        self._committed = start.committed
        self._due = bool(start.causes)
        self._news = bool(start.watchers or start.queues)
        self._passed_at = 0.0
        self._rearm = False
        """The next deadline may have moved, and nothing else is due."""
        self._closing = False
        for name, wish in WISHES.items():
            self._register(name, wish)

    @workflow.run
    async def run(self, input: FleetInput | None = None) -> None:
        """Live for ever, by continue-as-new."""
        work = asyncio.gather(self._run_passes(), self._send())
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                if work.done():
                    raise
                # A fleet that could be cancelled by a slip of the hand would forget everything it serves.
                workflow.logger.warning("a fleet cannot be cancelled: it goes on; terminate it to forget everything")
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new(
            FleetInput(
                cell=self._cell,
                state=self._state,
                outbox=tuple(self._outbox),
                watchers=self._jobs.watchers,
                queues=dict(self._jobs.queues),
                causes=tuple(self._causes),
                committed_by=self._committed_by,
                committed=self._committed,
            )
        )

    # -- passes and messages ------------------------------------------------------------------------------------------

    async def _run_passes(self) -> None:
        while True:
            self._rearm = False
            look = next_pass if workflow.patched("look-when-idle") else next_deadline
            deadline = look(self._state, self._passed_at)
            wait = None if deadline is None else max(0.0, deadline - workflow.time())
            try:
                await workflow.wait_condition(self._wake, timeout=wait, timeout_summary="next deadline")
            except TimeoutError:
                self._because_of_time()
            if workflow.info().is_continue_as_new_suggested():
                self._closing = True
                return
            if not self._due:
                continue
            causes, self._causes, self._due = tuple(self._causes), [], False
            self._passed_at = workflow.time()
            if not await self._run_pass(causes):
                self._due = True
                self._causes = [*causes, *self._causes][:CAUSES_KEPT]
                await workflow.sleep(PASS_RETRY_S, summary="the pass did not run: again soon")

    def _wake(self) -> bool:
        return self._due or self._rearm or workflow.info().is_continue_as_new_suggested()

    async def _run_pass(self, causes: tuple[Cause, ...]) -> bool:
        try:
            await workflow.execute_child_workflow(
                contract.RECONCILE_WORKFLOW,
                ReconcileInput(cell=self._cell, causes=causes, at=self._passed_at),
                id=reconcile_id(self._cell),
                parent_close_policy=ParentClosePolicy.ABANDON,
                task_timeout=calls.TASK_TIMEOUT,
                execution_timeout=calls.PASS_TIMEOUT,
            )
        except WorkflowAlreadyStartedError:
            return False  # somebody started one by hand; it ends soon
        except ChildWorkflowError as error:
            workflow.logger.warning("the pass failed: %s", error.cause or error)
            return False
        return True

    async def _send(self) -> None:
        while True:
            await workflow.wait_condition(lambda: bool(self._outbox) or self._news or self._closing)
            if self._news:
                self._news = False
                self._outbox.extend(self._jobs.news(self._state))
            if not self._outbox:
                if self._closing:
                    return
                continue
            message = self._outbox[0]
            body = message.welcome or message.answer or message.status or message.turn or message.rejoin
            if body is not None and not await signals.tell(message.workflow, message.signal, body):
                self._jobs.forget(message.workflow)  # it ended; nobody waits there any more
                self._news = True
            self._outbox.popleft()

    def _because_of_time(self) -> None:
        for due in came_due(self._state, self._passed_at, workflow.time()):
            self._because(Cause(sentence=due.sentence, trace=due.trace))
        if not self._due:
            self._because(Cause(sentence="a deadline came"))

    def _because(self, cause: Cause) -> None:
        self._due = True
        if len(self._causes) < CAUSES_KEPT:
            self._causes.append(cause)

    def _take(self, state: FleetState, sentence: str, *, trace: str = "") -> None:
        """Make a state the current one; a change is told to who watches, and makes a pass due that links to `trace`."""
        if state is not self._state:
            self._state = state
            self._news = True
            self._because(Cause(sentence=sentence, trace=trace or traceparent()))

    # -- facts, from nodes and replicas -------------------------------------------------------------------------------

    @workflow.signal(name=messages.SIGNAL_NODE_JOINED)
    def node_joined(self, joined: NodeJoined) -> None:
        """An agent introduced itself: answer with what it should run."""
        try:
            state = facts.node_joined(
                self._state,
                joined.node,
                joined.incarnation,
                joined.inventory,
                workflow.time(),
                joined.highest_generation,
            )
        except RefusedError as refused:
            workflow.logger.warning("%s", refused)  # its Node tells the agent, and sends none of these
            return
        self._take(state, f"node {joined.node} joined")
        claims = tuple(
            Claim(
                shard=ShardRef(replica=replica.id, generation=replica.generation, rank=shard.rank),
                state=replica.state,
            )
            for replica in facts.claims(self._state, joined.node)
            for shard in replica.shards
            if shard.node == joined.node
        )
        gap_s = loads_gap_s(len(self._state.nodes))
        welcome = Welcome(incarnation=joined.incarnation, claims=claims, loads_gap_s=gap_s)
        self._outbox.append(Message(workflow=node_id(joined.node), signal=messages.SIGNAL_WELCOME, welcome=welcome))

    @workflow.signal(name=messages.SIGNAL_NODE_MEASURED)
    def node_measured(self, measured: NodeMeasured) -> None:
        """A node's inventory changed."""
        self._know(measured.node)
        state = facts.node_measured(self._state, measured.node, measured.incarnation, measured.inventory)
        self._take(state, f"node {measured.node} measured itself")

    def _know(self, node: str) -> None:
        """A node that is no member here (this Fleet began anew) must join again."""
        if node not in self._state.nodes:
            self._outbox.append(
                Message(workflow=node_id(node), signal=node_contract.SIGNAL_REJOIN, rejoin=Rejoin(cell=self._cell))
            )

    @workflow.signal(name=messages.SIGNAL_NODE_LOST)
    def node_lost(self, lost: NodeLost) -> None:
        """A node is gone."""
        state = facts.node_lost(self._state, lost.node, lost.incarnation, lost.cause, workflow.time(), left=lost.left)
        self._take(state, f"node {lost.node} is lost: {lost.cause}")

    @workflow.signal(name=contract.SIGNAL_DESERTED)
    def deserted(self, node: Deserted) -> None:
        """A node's workflow is gone."""
        self.node_lost(NodeLost(node=node.node, incarnation=node.incarnation, cause="its workflow is gone"))

    @workflow.signal(name=contract.SIGNAL_ORPHANED)
    def orphaned(self, orphan: Orphan) -> None:
        """A replica's workflow is gone."""
        state = facts.replica_orphaned(self._state, orphan.replica, orphan.generation, workflow.time())
        start = self._state.replicas[orphan.replica].trace if orphan.replica in self._state.replicas else ""
        self._take(state, f"the workflow of replica {orphan.replica} is gone", trace=start)

    @workflow.signal(name=messages.SIGNAL_NODE_LOADS)
    def node_loads(self, told: NodeLoads) -> None:
        """A node told how busy its replicas are; a pass is due only where that changes what is wanted."""
        now = workflow.time()
        self._state = facts.loaded(self._state, told.node, told.incarnation, told.loads, now)
        for name in {load.model for load in self._loaded(told)}:
            self._weigh(self._state.models[name])
            self._rearm = self._rearm or self._state.models[name].spec.scaling is not None

    @workflow.signal(name=contract.SIGNAL_WANTED)
    def wanted(self, arg: NameArg) -> None:
        """Somebody asks the gateway for a model that has no replica."""
        for model in self._state.models.values():
            if arg.name in (model.spec.name, model.spec.id):
                self._state = facts.used(self._state, model.spec.id, workflow.time())
                self._weigh(self._state.models[model.spec.id])

    def _loaded(self, told: NodeLoads) -> list[ReplicaRecord]:
        replicas = self._state.replicas
        return [
            replicas[load.replica]
            for load in told.loads
            if load.replica in replicas and replicas[load.replica].model in self._state.models
        ]

    def _weigh(self, model: ModelRecord) -> None:
        mine = [replica for replica in self._state.replicas.values() if replica.model == model.spec.id]
        found = target(model, mine, workflow.time())
        if found.replicas != standing.wanted(self._state, model):
            self._because(Cause(sentence=f"{model.spec.name}: {found.reason}", trace=traceparent()))

    @workflow.signal(name=messages.SIGNAL_REPLICA_CHANGED)
    def replica_changed(self, event: ReplicaEvent) -> None:
        """A replica told where it is."""
        state = facts.replica_changed(self._state, event, workflow.time())
        if state.forced != self._state.forced:
            workflow.logger.warning("%s", forced_sentence(state.forced[-1]))
        self._take(state, f"replica {event.replica} is {event.state or 'stopped'}")

    # -- wishes, from jobs --------------------------------------------------------------------------------------------

    @workflow.signal(name=messages.SIGNAL_ASK)
    def ask(self, ask: Ask) -> None:
        """A job asks; it is answered, and told how the model is until it ends."""
        state, sentence, answers = self._jobs.take(self._state, ask, workflow.time())
        if sentence:
            self._take(state, sentence)
        self._state = state
        self._news = True
        self._outbox.extend(answers)

    @workflow.signal(name=contract.SIGNAL_JOB_ENDED)
    def job_ended(self, ended: JobEnded) -> None:
        """A job was terminated: the next one in its queue has its turn."""
        self._jobs.forget(ended.job)
        self._news = True

    # -- wishes, from people ------------------------------------------------------------------------------------------

    def _register(self, name: str, wish: Wish) -> None:
        def grant(arg: Any = None) -> Done:
            state = wish.grant(self._state, arg, workflow.time())
            sentence = wish.answer(self._state, arg)
            self._take(state, sentence)
            return Done(sentence=sentence)

        def check(arg: Any = None) -> None:
            if arg is None and wish.argument is not Nothing:
                raise failed(Failure(reason=Reason.BAD_INPUT, detail=f"input: {name} needs an argument"))
            try:
                wish.check(self._state, arg)
                wish.grant(self._state, arg, workflow.time())
            except RefusedError as refused:
                raise failed(refused.failure) from None

        for function in (grant, check):  # the SDK reads the argument's type from here
            function.__annotations__["arg"] = wish.argument | None
        workflow.set_update_handler(name, grant, validator=check)

    @workflow.signal(name=contract.SIGNAL_CONFIGURE)
    def configure(self, arg: ConfigureArg) -> None:
        """Take the policy of server.yaml."""
        if arg.policy != self._state.policy:
            self._take(wishes.configure(self._state, arg.policy), "the policy changed")

    # -- the pass -----------------------------------------------------------------------------------------------------

    @workflow.update(name=contract.UPDATE_COMMIT)
    def commit(self, request: CommitRequest) -> CommitResult:
        """Take a pass's plan, whole or not at all."""
        moved = commits.moved(self._state, request.plan)
        if moved:
            return CommitResult(accepted=False, moved=moved)
        state = commits.commit(self._state, request.plan, workflow.time())
        oversold = standing.oversold(self._state, state)
        if oversold:  # no plan of ours does that; a reservation sold twice would be an engine that kills another
            return CommitResult(accepted=False, moved=oversold)
        # No pass is due for it: a plan applied to its own outcome has no further steps, unless some were cut off.
        self._state = state
        self._committed_by, self._committed = request.pass_id, request.plan
        self._news = True
        if request.more:
            self._because(Cause(sentence="the plan of the last pass goes on"))
        return CommitResult(accepted=True)

    # -- questions ----------------------------------------------------------------------------------------------------

    @workflow.query(name=contract.QUERY_SNAPSHOT)
    def snapshot(self) -> Snapshot:
        """All there is to know."""
        return Snapshot(
            state=self._state,
            now=workflow.time(),
            committed_by=self._committed_by,
            committed=self._committed,
            queues=dict(self._jobs.queues),
            causes=tuple(self._causes),
        )

    @workflow.query(name=contract.QUERY_ROUTES)
    def routes(self) -> Routes:
        """Every model with the engines that take its requests now."""
        return routes(self._state)

    @workflow.query(name=contract.QUERY_EXPLAIN)
    def explain(self, arg: NameArg) -> Decision | None:
        """The last placement of a model; None before the first."""
        for model in self._state.models.values():
            if arg.name in (model.spec.name, model.spec.id):
                return model.decision
        return None

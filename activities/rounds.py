"""What a worker looks after by itself, now and then: that Fleet runs, and that each replica has its workflow.

Nothing here writes a history event while all is well: it reads, and signals Fleet what is wrong.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import TemporalError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities import contract, node_contract
from activities.contract import JobEnded, Orphan, Snapshot, fleet_id, replica_id
from fleet.reasons import Reason
from fleet.state import HOLDING, FleetState, NodeState, Policy, ReplicaState

log = logging.getLogger("llmgw.rounds")

TRACER = trace.get_tracer("llmgw.rounds")

EVERY_S = 10.0
"""Between rounds: a reader of `ctl status` may see a false state for so long. Each costs two calls."""

WATCHED = HOLDING - {ReplicaState.PLACED}
"""States in which a replica has a workflow; one that is placed is started again by the planner itself."""


class Rounds:
    """The rounds of one worker; several workers may make them at once."""

    def __init__(
        self,
        client: Client,
        cell: str,
        policy: Policy,
        task_timeout: timedelta,
        saw: Callable[[FleetState], None] = lambda _: None,
    ) -> None:
        """`saw` is told of Fleet's state in each round."""
        self._client = client
        self._cell = cell
        self._policy = policy
        self._task_timeout = task_timeout
        self._saw = saw
        self._missed: set[tuple[str, int]] = set()
        """Replicas and generations whose workflow was not listed in the last round."""
        self._odd: set[str] = set()
        """Node workflows that were on one side only in the last round."""
        self._asked: set[str] = set()
        """Node workflows that were asked to join, and are not known yet."""

    async def run(self, stop: asyncio.Event) -> None:
        """Make rounds until `stop`; what goes wrong with Temporal is logged, and tried again in the next.

        The first one tells Fleet the policy of this worker's configuration.
        """
        told = False
        while not stop.is_set():
            try:
                await self.ensure_fleet()
                if not told:
                    await self.configure()
                    told = True
                await self.find_orphans()
                await self.compare_nodes()
                await self.find_ended_jobs()
            except TemporalError as error:  # away, or Fleet cannot answer just now
                log.warning("round: %s", error)
            try:
                await asyncio.wait_for(stop.wait(), EVERY_S)
            except TimeoutError:
                continue

    async def ensure_fleet(self) -> bool:
        """Start the cell's Fleet if none runs; True if it was started."""
        try:
            await self._client.start_workflow(
                contract.FLEET_WORKFLOW,
                {"cell": self._cell, "state": {"cell": self._cell, "policy": self._policy.model_dump(mode="json")}},
                id=fleet_id(self._cell),
                task_queue=contract.CONTROL_QUEUE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                task_timeout=self._task_timeout,
                static_summary=f"the fleet of cell {self._cell}",
            )
        except WorkflowAlreadyStartedError:
            return False
        return True

    async def configure(self) -> None:
        """Tell Fleet the policy of this worker's configuration."""
        fleet = self._client.get_workflow_handle(fleet_id(self._cell))
        await fleet.signal(contract.SIGNAL_CONFIGURE, contract.ConfigureArg(policy=self._policy))

    async def find_orphans(self) -> list[str]:
        """Tell Fleet which replicas have no workflow any more; returns them.

        Visibility is asked first, once for all, and lags a little; what it misses is looked at itself.
        """
        fleet = self._client.get_workflow_handle(fleet_id(self._cell))
        snapshot: Snapshot = await fleet.query(contract.QUERY_SNAPSHOT, result_type=Snapshot)
        self._saw(snapshot.state)
        query = f"WorkflowType = '{contract.REPLICA_WORKFLOW}' AND ExecutionStatus = 'Running'"
        running = {workflow.id async for workflow in self._client.list_workflows(query)}
        held = [replica for replica in snapshot.state.replicas.values() if replica.state in WATCHED]
        missed = [replica for replica in held if replica_id(replica.id, self._cell) not in running]
        # Twice missed, a round apart: the first time its workflow may be starting or closing.
        twice = [replica for replica in missed if (replica.id, replica.generation) in self._missed]
        self._missed = {(replica.id, replica.generation) for replica in missed}
        found = [replica for replica in twice if not await self._runs(replica_id(replica.id, self._cell))]
        for replica in found:
            log.warning("the workflow of replica %s is gone: it is started anew", replica.id)
            await fleet.signal(contract.SIGNAL_ORPHANED, Orphan(replica=replica.id, generation=replica.generation))
        return [replica.id for replica in found]

    async def compare_nodes(self) -> list[str]:
        """Compare Fleet's nodes with the Node workflows; returns the nodes that are on one side only.

        One without a workflow (somebody terminated it) has nobody who would notice its agent's end: Fleet is told that
        it is lost. An agent that lives sees its lease closed and joins within seconds, with a new workflow. One that
        Fleet does not know (it began anew) is asked to join.
        """
        fleet = self._client.get_workflow_handle(fleet_id(self._cell))
        snapshot: Snapshot = await fleet.query(contract.QUERY_SNAPSHOT, result_type=Snapshot)
        query = f"WorkflowType = '{node_contract.NODE_WORKFLOW}' AND ExecutionStatus = 'Running'"
        running = {workflow.id async for workflow in self._client.list_workflows(query)}
        known = {contract.node_id(node.id): node for node in snapshot.state.nodes.values()}
        members = {key for key, node in known.items() if node.state is not NodeState.LOST}
        self._asked -= known.keys()
        # Twice, a round apart: a join may be under way, and visibility lags.
        odd = (running - known.keys()) | (members - running)
        twice, self._odd = odd & self._odd, odd
        for workflow in twice:
            node = known.get(workflow)
            if node is None and workflow not in self._asked:  # once: it may belong to another cell, and not mind
                self._asked.add(workflow)
                await self._ask_to_join(workflow)
            elif node is None:
                continue
            elif not await self._runs(workflow):
                log.warning("the workflow of node %s is gone, and no agent has joined since: it is lost", node.id)
                with node_lost(node.id):
                    deserted = contract.Deserted(node=node.id, incarnation=node.incarnation)
                    await fleet.signal(contract.SIGNAL_DESERTED, deserted)
        return sorted(twice)

    async def find_ended_jobs(self) -> list[str]:
        """Tell Fleet which jobs have ended without leaving their queue, because somebody terminated them; returns them.

        Only jobs that another one waits for are looked at: one that nobody waits for is in nobody's way.
        """
        fleet = self._client.get_workflow_handle(fleet_id(self._cell))
        snapshot: Snapshot = await fleet.query(contract.QUERY_SNAPSHOT, result_type=Snapshot)
        heads = [line[0].job for line in snapshot.queues.values() if len(line) > 1]
        ended = [job for job in heads if not await self._runs(job)]
        for job in ended:
            log.warning("%s has ended without a word: the next job on its model has its turn", job)
            await fleet.signal(contract.SIGNAL_JOB_ENDED, JobEnded(job=job))
        return ended

    async def _runs(self, workflow: str) -> bool:
        try:
            described = await self._client.get_workflow_handle(workflow).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise
        return described.status is WorkflowExecutionStatus.RUNNING

    async def _ask_to_join(self, workflow: str) -> None:
        rejoin = node_contract.Rejoin(cell=self._cell)
        try:
            await self._client.get_workflow_handle(workflow).signal(node_contract.SIGNAL_REJOIN, rejoin)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:  # it ended meanwhile
                raise


@contextmanager
def node_lost(node: str) -> Iterator[None]:
    """A trace of its own that says that a node is lost: the pass that takes its replicas elsewhere links to it."""
    reason = Reason.NODE_LOST.value
    attributes = {"llmgw.node": node, "llmgw.reason": reason, "error.type": reason}
    with TRACER.start_as_current_span("node lost", context=Context(), attributes=attributes) as span:
        span.set_status(Status(StatusCode.ERROR, "its workflow is gone"))
        yield

"""One pass: let the planner decide, then carry the plan out. It starts things and never waits for them."""

from opentelemetry.trace import Span
from temporalio import workflow
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

from activities import contract
from activities.contract import PassPlan, PlaceRequest, replica_id
from fleet.state import Decision
from fleet.steps import ENDS, Step, StepKind
from workflows import calls, messages, signals
from workflows.messages import Action, ReconcileInput, ReplicaInput, ToReplica
from workflows.spans import WAIT_FOR_WORKER, asked_ns, link, past, span

START_ATTEMPTS = 25
START_AGAIN_S = 0.2
"""An older run of the replica has told Fleet its end and closes within milliseconds: 5 s in all are ample. If it
does not, the fleet's `unstarted_after_s` brings the start back."""

EVENTS_KEPT = 100
"""Candidates turned down that get an event of their own; OpenTelemetry keeps 128 events a span."""


@workflow.defn(name=contract.RECONCILE_WORKFLOW)
class Reconcile:
    """`reconcile/<cell>`."""

    @workflow.run
    async def run(self, input: ReconcileInput | None = None) -> PassPlan:
        """Run one pass; returns what it did."""
        asked = input or ReconcileInput()
        pass_id = workflow.info().run_id
        begun = workflow.time_ns()
        plan = await calls.place(PlaceRequest(cell=asked.cell, pass_id=pass_id, now=max(asked.at, workflow.time())))
        if not plan.steps:
            return plan
        # Only now are spans opened, with the start they really had: a quiet pass leaves no trace.
        causes = dict.fromkeys((*asked.causes, *plan.causes))
        links = [found for cause in causes for found in link(cause.trace, {"llmgw.reason": cause.sentence})]
        reason = "; ".join(cause.sentence for cause in causes) or "asked for"
        with span("reconcile", {"llmgw.pass": pass_id, "llmgw.reason": reason}, start_ns=asked_ns(), links=links):
            past(WAIT_FOR_WORKER, asked_ns(), until_ns=begun)
            past("decide", begun)
            for step in plan.steps:
                await self._carry_out(asked.cell, step, plan)
        return plan

    async def _carry_out(self, cell: str, step: Step, plan: PassPlan) -> None:
        attributes = {"llmgw.model": step.model, "llmgw.replica": step.replica, "llmgw.reason": step.reason}
        with span(step.kind.value, attributes):
            if step.kind is StepKind.REAP or step.kind in ENDS:
                await self._signal(cell, step, plan)
            elif step.decision is not None:
                with span("place", {"llmgw.model": step.model, "llmgw.replica": step.replica}) as placing:
                    describe(placing, step.decision)
                    if step.decision.shards:
                        await self._start(cell, step, plan, Action.START)
            else:
                await self._start(cell, step, plan, Action.START)

    async def _signal(self, cell: str, step: Step, plan: PassPlan) -> None:
        signal = messages.SIGNAL_STOP if step.at_once else messages.SIGNAL_DRAIN
        if step.kind is StepKind.REAP:
            signal = messages.SIGNAL_NODE_GONE
        command = ToReplica(generation=step.generation, reason=step.reason, lost=step.lost)
        told = await signals.tell(replica_id(step.replica, cell), signal, command)
        if not told and step.kind is not StepKind.REAP and step.replica in plan.starts:
            # Its workflow is gone (somebody terminated it), but its engine may run: a new run stops it.
            await self._start(cell, step, plan, Action.STOP)

    async def _start(self, cell: str, step: Step, plan: PassPlan, action: Action) -> None:
        start = plan.starts[step.replica]
        request = ReplicaInput(
            cell=cell,
            replica=step.replica,
            generation=step.generation,
            model=start.model,
            action=action,
            shards=start.assignments,
            start=start,
            decided_at_ns=workflow.time_ns(),
        )
        for attempt in range(START_ATTEMPTS):
            try:
                await workflow.start_child_workflow(
                    contract.REPLICA_WORKFLOW,
                    request,
                    id=replica_id(step.replica, cell),
                    parent_close_policy=ParentClosePolicy.ABANDON,
                    task_timeout=calls.TASK_TIMEOUT,
                    static_summary=f"{start.model} on {', '.join(start.nodes)}"[:190],
                )
            except WorkflowAlreadyStartedError:
                if attempt == 0:
                    # An older generation that still runs has no right to; this very one goes on undisturbed.
                    superseded = ToReplica(generation=step.generation)
                    await signals.tell(replica_id(step.replica, cell), messages.SIGNAL_SUPERSEDED, superseded)
                    if step.kind is StepKind.RESUME:
                        return
                await workflow.sleep(START_AGAIN_S, summary="an older run is closing")
            else:
                return
        workflow.logger.warning("replica %s: an older run does not close; it is tried again later", step.replica)


def describe(placing: Span, decision: Decision) -> None:
    """Say on a `place` span where it went with its scores, or who turned it down and why."""
    placing.set_attribute("llmgw.decision", decision.sentence)
    if decision.shards:
        placing.set_attribute("llmgw.node", ",".join(shard.node for shard in decision.shards))
        winner = next(verdict for verdict in decision.verdicts if verdict.node == decision.shards[0].node)
        placing.set_attribute("llmgw.score", winner.score)
        for name, part in winner.parts.items():
            placing.set_attribute(f"llmgw.score.{name}", part)
        return
    # Of many nodes these are the nearest misses, see `fleet.steps.brief`; the others are counted.
    for reason, count in decision.turned_down.items():
        placing.set_attribute(f"llmgw.turned_down.{reason}", count)
    for verdict in sorted(decision.verdicts, key=lambda verdict: verdict.need - verdict.free)[:EVENTS_KEPT]:
        placing.add_event(
            f"turned down by {verdict.node}",
            {
                "llmgw.node": verdict.node,
                "llmgw.reason": verdict.reason.value if verdict.reason else "",
                "llmgw.need": verdict.need,
                "llmgw.free": verdict.free,
            },
            timestamp=workflow.time_ns(),
        )

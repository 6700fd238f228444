"""One job on one model: registry, mirror, check, catalog, placement, smoke test, each shown while it runs."""

from typing import Any

from opentelemetry.trace import Span
from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from activities import contract
from activities.contract import (
    CheckRequest,
    CheckResult,
    JobResult,
    JobState,
    JobStatus,
    MirrorRequest,
    MirrorResult,
    ResolveRequest,
    SmokeRequest,
    SmokeResult,
)
from fleet.inputs import read_request, spec_of, updated
from fleet.job_queue import Turn
from fleet.metrics import JOBS
from fleet.reasons import Failure, LlmgwError, Reason
from fleet.render import markdown, size, steps_table
from fleet.repos import default_name, parse_repo
from fleet.spec import JobKind, JobRequest, ModelSpec, ResolvedModel, Task
from fleet.tasks import task_of
from fleet.trace_ids import trace_id_of
from fleet.wishes import Applied
from workflows import calls, messages, preflight
from workflows.cancels import to_the_end
from workflows.failures import failed, failure_of
from workflows.fleet_line import FleetLine
from workflows.job_details import (
    applied_detail,
    endpoint_of,
    first_token,
    mirrored_detail,
    resolved_detail,
    smoke_answer,
    smoke_detail,
    smoke_question,
)
from workflows.messages import Answer, Ask, AskKind, ModelStatus, Phase
from workflows.numbers import count
from workflows.placement_wait import PlacementWait
from workflows.spans import (
    TELL_FLEET,
    WAIT_FOR_WORKER,
    asked_ns,
    ends,
    fail,
    past,
    searchable,
    shown,
    span,
    traceparent,
)
from workflows.steps import Step, Steps

MODEL = SearchAttributeKey.for_keyword(contract.SEARCH_MODEL)
STATE = SearchAttributeKey.for_keyword(contract.SEARCH_STATE)

EXAMPLE = '{"repo": "file:/models/model.gguf"}'


@workflow.defn(name=contract.MODEL_JOB_WORKFLOW)
class ModelJob:
    """`job/<kind>/<model>/<n>` from ctl; anything from elsewhere."""

    @workflow.init
    def __init__(self, *inputs: Any) -> None:
        # Any number of anything is taken, and looked at in `run`: an input refused by the SDK would leave a workflow
        # that cannot say how it stands, and two inputs one that never ends.
        self._inputs = inputs
        self._request = JobRequest()
        self._cell = self._request.cell
        self._name = self._request.name or ""
        self._state = JobState.RUNNING
        self._failure: Failure | None = None
        self._result: JobResult | None = None
        self._trace = ""
        self._line = FleetLine()
        self._wait = PlacementWait(self._line, None)
        self._steps = Steps(self._show)

    @workflow.run
    async def run(self, *inputs: Any) -> JobResult:
        """Run the steps; a failure is an ApplicationError whose type is the reason. Takes one `JobRequest`."""
        refused = self._read_input()
        kind = self._request.kind
        attributes = {"llmgw.job": workflow.info().workflow_id, "llmgw.repo": self._request.repo or ""}
        with span(f"{kind} model", attributes, start_ns=asked_ns()) as root:
            past(WAIT_FOR_WORKER, asked_ns())
            self._trace = traceparent(root)
            try:
                if refused:
                    with self._steps.run("registry"):
                        raise _bad_input(refused)
                workflow.upsert_search_attributes(
                    [MODEL.value_set(self._name), STATE.value_set(self._state), *searchable(self._trace)]
                )
                result = await (self._remove() if kind is JobKind.REMOVE else self._bring())
            except BaseException as error:
                if not ends(error):
                    raise
                await self._ended_badly(error, root)
                raise
            await self._hang_up(take_back=False)
            self._result = result
            self._finish(JobState.DONE, root, result.sentence)
            return result

    def _read_input(self) -> str:
        """Take the request in; what is wrong with it, in a sentence that names the field, or ""."""
        if len(self._inputs) > 1:
            return f"input: a ModelJob takes one input, not {len(self._inputs)}: {EXAMPLE}"
        try:
            request = read_request(self._inputs[0] if self._inputs else None)
        except LlmgwError as error:
            return error.failure.detail
        self._request, self._cell, self._name = request, request.cell, request.name or ""
        self._wait = PlacementWait(self._line, request.room_deadline_s)
        self._line.cell = request.cell
        wrong = self._read_name(request)
        self._line.name = self._name
        return wrong

    def _read_name(self, request: JobRequest) -> str:
        if request.kind is JobKind.REMOVE:
            return "" if request.name is not None else "name: a remove job needs the name of a model"
        if request.delete_weights:
            return f"delete_weights: a {request.kind} job deletes nothing; a remove job does"
        if request.kind is JobKind.UPDATE and request.name is not None and request.repo is None:
            return ""
        if request.repo is None:
            return f"repo: Field required, such as {EXAMPLE}"
        try:
            self._name = request.name or default_name(parse_repo(request.repo))
        except LlmgwError as error:
            return error.failure.detail
        return ""

    # -- the kinds ----------------------------------------------------------------------------------------------------

    async def _bring(self) -> JobResult:
        with self._steps.run("registry") as step:
            await self._take_turn(step, "look up")
            if self._request.kind is JobKind.UPDATE:
                await self._take_over()
            resolved = await self._resolve(step)
            step.say(resolved_detail(resolved))
        with self._steps.run("mirror") as step:
            mirrored = await calls.mirror_model(MirrorRequest(resolved=resolved, token=self._request.token or ""))
            step.say(mirrored_detail(mirrored))
        if self._request.kind is JobKind.MIRROR:
            for name in ("check", "catalog", "placement", "smoke test"):
                self._steps.skip(name, "a mirror job ends with the mirror")
            return JobResult(model=self._name, sentence=f"{self._name}: {mirrored_detail(mirrored)}")
        with self._steps.run("check") as step:
            checked = await self._check_or_discard(mirrored, step)
        with self._steps.run("catalog") as step:
            spec = self._spec(resolved, mirrored, checked)
            applied = await self._apply(spec, step)
        with self._steps.run("placement") as step:
            served = await self._wait.until(Phase.SERVING, step)
        smoke = await self._smoke(served, spec.task)
        serves = "is serving" if served.replicas else "is in the catalog"
        same = "" if applied.changed else ", as before: nothing was to be changed"
        return JobResult(
            model=self._name,
            sentence=f"{self._name} {serves}: {served.sentence}{same}",
            endpoint=endpoint_of(served),
            replicas=tuple(replica.replica for replica in served.replicas),
            smoke_test=smoke,
        )

    async def _remove(self) -> JobResult:
        for name in ("registry", "check"):
            self._steps.skip(name, "nothing to look up for a remove")
        if not self._request.delete_weights:
            self._steps.skip("mirror", "the weights stay in the mirror")
        with self._steps.run("catalog") as step:
            await self._take_turn(step, TELL_FLEET)
            removed = await self._line.ask(self._line.asks(AskKind.REMOVE))
            step.say(f"{self._name} is taken out of the catalog")
        with self._steps.run("placement") as step:
            await self._wait.until(Phase.REMOVED, step)
        self._steps.skip("smoke test", "nothing serves any more")
        deleted = ""
        if self._request.delete_weights:
            with self._steps.run("mirror") as step:
                deleted = await self._delete_weights(removed)
                step.say(deleted)
        also = f"; {deleted}" if deleted else ""
        return JobResult(
            model=self._name, sentence=f"{self._name} is removed: its replicas are drained and stopped{also}"
        )

    # -- the steps ----------------------------------------------------------------------------------------------------

    async def _take_turn(self, step: Step, then: str) -> None:
        # Jobs that began before there were queues go on without one.
        self._wait.may_end_early = workflow.patched("queues")
        if self._wait.may_end_early and await self._line.take_turn(self._request.kind, step):
            step.part(then)

    async def _take_over(self) -> None:
        """An update is the request in the catalog with what was given put over it."""
        answer = await self._line.ask(self._line.asks(AskKind.KNOWN))
        try:
            self._request = updated(answer.known or JobRequest(), self._request)
        except LlmgwError as error:
            raise failed(error.failure) from error
        self._name = self._line.name = self._request.name or self._name

    async def _resolve(self, step: Step) -> ResolvedModel:
        """Look the repo up; a hub that asks to wait is asked again when it said."""
        request = _resolve_request(self._request)
        waited = 0.0
        while True:
            try:
                return await calls.resolve_model(request)
            except ActivityError as error:
                failure = failure_of(error)
                waited += failure.retry_after_s
                if not failure.retry_after_s or waited > calls.HUB_WAIT_MAX_S:
                    raise
                step.say(failure.detail)
                step.part("wait for hub", before="look up")
                await workflow.sleep(failure.retry_after_s, summary="as long as the hub asks to wait")
                step.part("look up")

    async def _check_or_discard(self, mirrored: MirrorResult, step: Step) -> CheckResult:
        request = CheckRequest(cell=self._cell, weights=mirrored.weights, request=self._request)
        try:
            return await preflight.check(request, step)
        except (ActivityError, ApplicationError) as error:
            if failure_of(error).reason is Reason.WEIGHTS_UNREADABLE and mirrored.outcome == "copied":
                await calls.discard_weights(mirrored.weights)  # nobody can use it, and it may be large
            raise

    def _spec(self, resolved: ResolvedModel, mirrored: MirrorResult, checked: CheckResult) -> ModelSpec:
        return spec_of(
            self._name,
            self._request,
            repo=f"{resolved.repo}@{resolved.revision}",
            engine=checked.engine,
            weights=mirrored.weights,
            need=checked.need,
            context_length=checked.context_length,
            task=task_of(checked.architecture),
        )

    async def _apply(self, spec: ModelSpec, step: Step) -> Applied:
        self._line.applied = True
        answer = await self._line.ask(Ask(kind=AskKind.APPLY, job=workflow.info().workflow_id, spec=spec))
        if answer.applied is None:
            raise failed(Failure(reason=Reason.INTERNAL, detail="Fleet did not say what it applied"))
        step.say(applied_detail(self._name, answer.applied))
        return answer.applied

    async def _smoke(self, served: ModelStatus, task: Task) -> SmokeResult | None:
        endpoint = endpoint_of(served)
        if not endpoint:
            self._steps.skip("smoke test", "no replica is wanted")
            return None
        with self._steps.run("smoke test") as step:
            request = SmokeRequest(endpoint=endpoint, model=self._name, task=task)
            step.span.set_attributes(smoke_question(request))
            result = await calls.smoke_test(request)
            step.span.set_attributes(smoke_answer(result))
            at_ns = result.first_token_ns or workflow.time_ns()
            first = {**smoke_question(request), **smoke_answer(result), **first_token(result)}
            event = "first token" if task is Task.GENERATE else "first answer"
            step.span.add_event(event, first, timestamp=at_ns)
            step.say(smoke_detail(result))
            return result

    async def _delete_weights(self, removed: Answer) -> str:
        if removed.weights is None:
            return "there were no weights"
        if removed.shared_with:
            return f"the weights stay in the mirror: {', '.join(removed.shared_with)} uses them too"
        await calls.discard_weights(removed.weights)
        return f"{size(removed.weights.size)} are deleted from the mirror"

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _ended_badly(self, error: BaseException, root: Span) -> None:
        cancelled = is_cancelled_exception(error)
        # Nothing half done: what this job did to the catalog and nobody has used yet is undone.
        await self._hang_up(take_back=cancelled or self._wait.take_back)
        self._failure = failure_of(error)
        fail(root, self._failure)
        self._finish(JobState.CANCELLED if cancelled else JobState.FAILED, root, self._failure.line)

    async def _hang_up(self, *, take_back: bool) -> None:
        # A cancellation that comes now must not keep the next job from its turn.
        await to_the_end(self._line.hang_up(take_back=take_back))

    def _finish(self, state: JobState, root: Span, detail: str) -> None:
        self._state = state
        labels = {"llmgw.kind": self._request.kind.value, "llmgw.state": state.value}
        count(JOBS, labels if self._failure is None else {**labels, "error.type": self._failure.reason.value})
        workflow.upsert_search_attributes([STATE.value_set(state), *searchable(self._trace)])
        # The repo of an update may be the one in the catalog, and the name the repo's.
        known = {"llmgw.repo": self._request.repo or "", "llmgw.model": self._name}
        root.set_attributes({**known, "llmgw.state": state.value, "llmgw.detail": detail})
        self._show()

    # -- what arrives and what is asked -------------------------------------------------------------------------------

    @workflow.signal(name=messages.SIGNAL_ANSWER)
    def answer(self, answer: Answer) -> None:
        """Fleet answered."""
        self._line.answered(answer)

    @workflow.signal(name=messages.SIGNAL_MODEL_STATUS)
    def model_status(self, status: ModelStatus) -> None:
        """Fleet tells how the model is."""
        self._line.told(status)

    @workflow.signal(name=messages.SIGNAL_TURN)
    def turn(self, turn: Turn) -> None:
        """Fleet tells whose turn it is."""
        self._line.turn = turn

    @workflow.query(name=contract.QUERY_STATUS)
    def status(self) -> JobStatus:
        """The job as ctl shows it."""
        model = self._line.model
        return JobStatus(
            job=workflow.info().workflow_id,
            kind=self._request.kind,
            state=self._state,
            repo=self._request.repo or "",
            model=self._name,
            steps=self._steps.rows,
            trace=self._trace,
            trace_id=trace_id_of(self._trace),
            replicas=tuple(replica.replica for replica in model.replicas) if model else (),
            failure=self._failure,
            result=self._result,
        )

    def _show(self) -> None:
        text = steps_table(f"{self._request.kind} {self._name}: {self._state}", self._steps.rows)
        if self._failure is not None:
            text += f"\n\n{markdown(self._failure.line)}"
        workflow.set_current_details(text + shown(self._trace))


def _resolve_request(request: JobRequest) -> ResolveRequest:
    return ResolveRequest(
        repo=request.repo or "",
        token=request.token or "",
        engine=request.engine,
        args=request.args,
        trust_remote_code=request.trust_remote_code,
        cell=request.cell,
    )


def _bad_input(sentence: str) -> Exception:
    return failed(Failure(reason=Reason.BAD_INPUT, detail=sentence))

"""One job on one model: registry, mirror, check, catalog, placement, smoke test, each shown while it runs."""

import asyncio
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
    fleet_id,
)
from activities.node_contract import PreflightRequest
from fleet.inputs import read_request, spec_of
from fleet.reasons import Failure, LlmgwError, Reason
from fleet.render import duration, markdown, size, steps_table
from fleet.repos import default_name, parse_repo
from fleet.spec import JobKind, JobRequest, ModelSpec, ResolvedModel
from workflows import calls, messages
from workflows.messages import Answer, Ask, AskKind, ModelStatus, Phase
from workflows.spans import ends, fail, link, span, traceparent
from workflows.steps import Step, Steps

MODEL = SearchAttributeKey.for_keyword(contract.SEARCH_MODEL)
STATE = SearchAttributeKey.for_keyword(contract.SEARCH_STATE)

FLEET_WAIT_S = 30.0
"""How long a job waits for a Fleet that does not run before it fails and says so."""

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
        self._trace = ""
        self._answer: Answer | None = None
        self._model: ModelStatus | None = None
        """How the model was when Fleet last told."""
        self._news: list[ModelStatus] = []
        """What Fleet told and the placement step has not looked at."""
        self._asked = False
        self._steps = Steps(self._show)

    @workflow.run
    async def run(self, *inputs: Any) -> JobResult:
        """Run the steps; a failure is an ApplicationError whose type is the reason. Takes one `JobRequest`."""
        refused = self._read_input()
        kind = self._request.kind
        attributes = {"llmgw.job": workflow.info().workflow_id, "llmgw.repo": self._request.repo or ""}
        with span(f"{kind} model", attributes) as root:
            self._trace = traceparent(root)
            try:
                if refused:
                    with self._steps.run("registry"):
                        raise _bad_input(refused)
                workflow.upsert_search_attributes([MODEL.value_set(self._name), STATE.value_set(self._state)])
                result = await (self._remove() if kind is JobKind.REMOVE else self._bring())
            except BaseException as error:
                if not ends(error):
                    raise
                await self._ended_badly(error, root)
                raise
            self._finish(JobState.DONE, root)
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
        if request.kind is JobKind.REMOVE:
            return "" if request.name is not None else "name: a remove job needs the name of a model"
        if request.repo is None:
            return f"repo: Field required, such as {EXAMPLE}"
        try:
            self._name = request.name or default_name(parse_repo(request.repo))
        except LlmgwError as error:
            return f"repo: {error.failure.detail}"
        return ""

    # -- the kinds ----------------------------------------------------------------------------------------------------

    async def _bring(self) -> JobResult:
        with self._steps.run("registry") as step:
            resolved = await calls.resolve_model(ResolveRequest(repo=self._request.repo or ""))
            step.say(f"{resolved.repo} at {resolved.revision[:12]}: {_files(resolved)}")
        with self._steps.run("mirror") as step:
            mirrored = await calls.mirror_model(MirrorRequest(resolved=resolved))
            step.say(_mirrored(mirrored))
        if self._request.kind is JobKind.MIRROR:
            for name in ("check", "catalog", "placement", "smoke test"):
                self._steps.skip(name, "a mirror job ends with the mirror")
            return JobResult(model=self._name, sentence=f"{self._name}: {_mirrored(mirrored)}")
        with self._steps.run("check") as step:
            checked = await self._check_or_discard(mirrored, step)
        with self._steps.run("catalog") as step:
            await self._apply(self._spec(resolved, mirrored, checked), step)
        with self._steps.run("placement") as step:
            served = await self._wait(step)
        smoke = await self._smoke(served)
        serves = "is serving" if served.replicas else "is in the catalog"
        return JobResult(
            model=self._name,
            sentence=f"{self._name} {serves}: {served.sentence}",
            endpoint=_endpoint(served),
            replicas=tuple(replica.replica for replica in served.replicas),
            smoke_test=smoke,
        )

    async def _remove(self) -> JobResult:
        for name in ("registry", "mirror", "check"):
            self._steps.skip(name, "nothing to look up for a remove")
        with self._steps.run("catalog") as step:
            await self._ask(Ask(kind=AskKind.REMOVE, job=workflow.info().workflow_id, name=self._name))
            step.say(f"{self._name} is taken out of the catalog")
        with self._steps.run("placement") as step:
            await self._wait(step)
        self._steps.skip("smoke test", "nothing serves any more")
        return JobResult(model=self._name, sentence=f"{self._name} is removed: its replicas are drained and stopped")

    # -- the steps ----------------------------------------------------------------------------------------------------

    async def _check_or_discard(self, mirrored: MirrorResult, step: Step) -> CheckResult:
        try:
            return await self._check(mirrored, step)
        except (ActivityError, ApplicationError) as error:
            if calls.failure_of(error).reason is Reason.WEIGHTS_UNREADABLE and mirrored.outcome == "copied":
                await calls.discard_weights(mirrored.weights)  # nobody can use it, and it may be large
            raise

    async def _check(self, mirrored: MirrorResult, step: Step) -> CheckResult:
        checked = await calls.check_fit(CheckRequest(cell=self._cell, weights=mirrored.weights, request=self._request))
        step.say(checked.sentence)
        if checked.candidate:
            found = await calls.preflight(
                checked.candidate,
                PreflightRequest(engine=checked.engine, need=checked.need, weights=mirrored.weights),
            )
            if found.failure is not None:
                raise calls.failed(found.failure)
            installed = "installed" if found.engine_installed else "to be installed"
            engine = f"{checked.engine} {found.engine_version} {installed}"
            step.say(f"{checked.sentence}; {checked.candidate}: {engine}, {size(found.free_memory)} free")
        return checked

    def _spec(self, resolved: ResolvedModel, mirrored: MirrorResult, checked: CheckResult) -> ModelSpec:
        return spec_of(
            self._name,
            self._request,
            repo=f"{resolved.repo}@{resolved.revision}",
            engine=checked.engine,
            weights=mirrored.weights,
            need=checked.need,
            context_length=checked.context_length,
        )

    async def _apply(self, spec: ModelSpec, step: Step) -> None:
        self._asked = True
        answer = await self._ask(Ask(kind=AskKind.APPLY, job=workflow.info().workflow_id, spec=spec))
        applied = answer.applied
        if applied is None:
            raise calls.failed(Failure(reason=Reason.INTERNAL, detail="Fleet did not say what it applied"))
        if applied.created:
            step.say(f"{self._name} is new in the catalog")
        elif applied.restarts:
            step.say(f"{self._name} changed: version {applied.spec_version} replaces what serves")
        elif applied.changed:
            step.say(f"{self._name} changed, and what serves goes on: {applied.difference}")
        else:
            step.say(f"{self._name} is in the catalog already, unchanged")

    async def _ask(self, ask: Ask) -> Answer:
        self._answer = None
        fleet = fleet_id(self._cell)
        if not await calls.tell_surely(fleet, messages.SIGNAL_ASK, ask, give_up_after_s=FLEET_WAIT_S):
            raise calls.failed(Failure(reason=Reason.INTERNAL, detail=f"{fleet} does not run: start worker.py"))
        await workflow.wait_condition(lambda: self._answer is not None)
        answer: Answer = self._answer or Answer()
        if answer.failure is not None:
            raise calls.failed(answer.failure)
        return answer

    async def _wait(self, step: Step) -> ModelStatus:
        """Until the model serves (or is gone, for a remove), showing why it does not yet."""
        goal = Phase.REMOVED if self._request.kind is JobKind.REMOVE else Phase.SERVING
        linked: set[str] = set()
        while True:
            await workflow.wait_condition(lambda: bool(self._news))
            status = self._news.pop(0)
            step.say(status.sentence)
            for replica in status.replicas:
                if goal is Phase.SERVING and replica.trace not in linked:
                    linked.add(replica.trace)
                    for found in link(replica.trace, {"llmgw.replica": replica.replica}):
                        step.span.add_link(found.context, found.attributes)
            if status.phase is goal:
                return status
            if status.phase is Phase.FAILED and status.failure is not None:
                raise calls.failed(status.failure)
            if status.phase is Phase.REMOVED:
                raise calls.failed(Failure(reason=Reason.CANCELLED, detail=f"{self._name} was removed meanwhile"))

    async def _smoke(self, served: ModelStatus) -> SmokeResult | None:
        endpoint = _endpoint(served)
        if not endpoint:
            self._steps.skip("smoke test", "no replica is wanted")
            return None
        with self._steps.run("smoke test") as step:
            result = await calls.smoke_test(SmokeRequest(endpoint=endpoint, model=self._name))
            took = duration(result.seconds)
            step.say(f"{result.completion_tokens} tokens in {took}, {result.tokens_per_second:.0f} tokens/s")
            return result

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _ended_badly(self, error: BaseException, root: Span) -> None:
        cancelled = is_cancelled_exception(error)
        if cancelled and self._asked:
            # Nothing half done: what this job put into the catalog and nobody has used yet goes again.
            await asyncio.shield(asyncio.ensure_future(self._take_back()))
        self._failure = calls.failure_of(error)
        fail(root, self._failure)
        self._finish(JobState.CANCELLED if cancelled else JobState.FAILED, root)

    async def _take_back(self) -> None:
        ask = Ask(kind=AskKind.ABANDON, job=workflow.info().workflow_id, name=self._name)
        await calls.tell_surely(fleet_id(self._cell), messages.SIGNAL_ASK, ask, give_up_after_s=FLEET_WAIT_S)

    def _finish(self, state: JobState, root: Span) -> None:
        self._state = state
        workflow.upsert_search_attributes([STATE.value_set(state)])
        root.set_attribute("llmgw.model", self._name)
        root.set_attribute("llmgw.state", state.value)
        self._show()

    # -- what arrives and what is asked -------------------------------------------------------------------------------

    @workflow.signal(name=messages.SIGNAL_ANSWER)
    def answer(self, answer: Answer) -> None:
        """Fleet answered."""
        self._answer = answer

    @workflow.signal(name=messages.SIGNAL_MODEL_STATUS)
    def model_status(self, status: ModelStatus) -> None:
        """Fleet tells how the model is."""
        self._model = status
        self._news.append(status)

    @workflow.query(name=contract.QUERY_STATUS)
    def status(self) -> JobStatus:
        """The job as ctl shows it."""
        return JobStatus(
            job=workflow.info().workflow_id,
            kind=self._request.kind,
            state=self._state,
            repo=self._request.repo or "",
            model=self._name,
            steps=self._steps.rows,
            trace=self._trace,
            replicas=tuple(replica.replica for replica in self._model.replicas) if self._model else (),
            failure=self._failure,
        )

    def _show(self) -> None:
        text = steps_table(f"{self._request.kind} {self._name}: {self._state}", self._steps.rows)
        if self._failure is not None:
            text += f"\n\n{markdown(self._failure.line)}"
        workflow.set_current_details(text)


def _bad_input(sentence: str) -> Exception:
    return calls.failed(Failure(reason=Reason.BAD_INPUT, detail=sentence))


def _files(resolved: ResolvedModel) -> str:
    count = len(resolved.files)
    return f"{count} file{'s' if count != 1 else ''}, {size(resolved.size)}, {resolved.format}"


def _mirrored(mirrored: MirrorResult) -> str:
    if mirrored.outcome == "already mirrored":
        return f"already mirrored, {size(mirrored.weights.size)}"
    rate = mirrored.copied_bytes / mirrored.seconds if mirrored.seconds > 0 else 0.0
    return f"copied {size(mirrored.copied_bytes)} in {duration(mirrored.seconds)} ({size(round(rate))}/s)"


def _endpoint(status: ModelStatus) -> str:
    return next((replica.endpoint for replica in status.replicas if replica.endpoint), "")

"""A check alone: a repo is looked up and compared with the fleet, or with machines on paper; nothing is changed."""

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

from activities import contract
from activities.contract import CheckRepoRequest, CheckReport, ResolveRequest
from activities.node_contract import PreflightRequest, PreflightResult
from fleet.inputs import read_check
from fleet.paper import CheckWish
from fleet.reasons import LlmgwError, Reason
from fleet.render import markdown, size
from fleet.repos import default_name, parse_repo, weights_id
from fleet.spec import ResolvedModel, Weights
from workflows import calls
from workflows.failures import failed, failure_of
from workflows.job_details import resolved_detail
from workflows.spans import WAIT_FOR_WORKER, asked_ns, past, span

EXAMPLE = '{"repo": "org/name", "paper": {"gpus": "2x80GiB"}}'


@workflow.defn(name=contract.MODEL_CHECK_WORKFLOW)
class ModelCheck:
    """`check/<model>/<n>` from ctl; anything from elsewhere."""

    @workflow.run
    async def run(self, *inputs: Any) -> CheckReport:
        """Takes one `CheckWish`; a failure is an ApplicationError whose type is the reason.

        That a model does not fit is no failure, but the answer.
        """
        try:
            wish = read_check(inputs, EXAMPLE)
            name = wish.name or default_name(parse_repo(wish.repo or ""))
        except LlmgwError as error:
            raise failed(error.failure) from None
        attributes = {"llmgw.job": workflow.info().workflow_id, "llmgw.repo": wish.repo or "", "llmgw.model": name}
        with span("check model", attributes, start_ns=asked_ns()):
            past(WAIT_FOR_WORKER, asked_ns())
            try:
                return await self._check(name, wish)
            except ActivityError as error:
                raise failed(failure_of(error)) from error

    async def _check(self, name: str, wish: CheckWish) -> CheckReport:
        with span("registry", {}):
            resolved = await calls.resolve_model(
                ResolveRequest(
                    repo=wish.repo or "",
                    token=wish.token or "",
                    engine=wish.engine,
                    args=wish.args,
                    trust_remote_code=wish.trust_remote_code,
                    cell=wish.cell,
                )
            )
        _show(resolved_detail(resolved))
        with span("check", {}) as step:
            checked = await calls.check_repo(CheckRepoRequest(resolved=resolved, wish=wish))
            sentence = checked.sentence
            preflight = None
            if checked.candidate and wish.paper is None and checked.reason is None:
                preflight = await _preflight(checked, resolved)
            if preflight is not None and preflight.failure is not None:
                sentence = f"{sentence}; but now: {preflight.failure.cause}"
            elif preflight is not None:
                sentence = f"{sentence}; {checked.candidate} has {size(preflight.free_memory)} free"
            step.set_attribute("llmgw.detail", sentence)
        _show(f"{resolved_detail(resolved)}\n\n{sentence}")
        return CheckReport(
            model=name,
            repo=resolved.repo,
            revision=resolved.revision,
            size=resolved.size,
            check=checked,
            preflight=preflight,
            sentence=sentence,
        )


async def _preflight(checked: contract.CheckResult, resolved: ResolvedModel) -> PreflightResult | None:
    """What the candidate finds on itself; None where it does not answer: it is then no candidate."""
    weights = Weights(
        model_id=weights_id(resolved),
        format=resolved.format,
        entry=resolved.entry,
        files=resolved.files,
        mirror="",
    )
    try:
        return await calls.preflight(
            checked.candidate, PreflightRequest(engine=checked.engine, need=checked.need, weights=weights)
        )
    except ActivityError as error:
        if failure_of(error, node=checked.candidate).reason is not Reason.NODE_UNREACHABLE:
            raise
        return None


def _show(text: str) -> None:
    workflow.set_current_details("\n\n".join(markdown(part) for part in text.split("\n\n")))

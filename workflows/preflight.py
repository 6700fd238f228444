"""A job's check: the control plane's estimate, then a candidate node's own look at itself, which may have to wait."""

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from activities.contract import CheckRequest, CheckResult
from activities.node_contract import PreflightRequest, PreflightResult
from fleet.reasons import Reason
from fleet.render import size
from workflows import calls
from workflows.failures import failed, failure_of
from workflows.steps import Step


async def check(request: CheckRequest, step: Step) -> CheckResult:
    """Raises ApplicationError with the reason, and ActivityError as the estimate does.

    A candidate that does not answer may be an agent that restarts: others are asked before it, then it again, until it
    is back or the fleet counts it as lost. Where nobody is left to be asked, placement waits for a node and says so.
    """
    began = workflow.time()
    while True:
        checked = await calls.check_fit(request)
        others = [node for node in request.silent if node != checked.candidate]
        waited = f"; {', '.join(others)} did not answer" if others else ""
        still = f"; {checked.candidate} does not answer: waiting for it or another node"
        step.say(checked.sentence + waited + (still if checked.candidate in request.silent else ""))
        if not checked.candidate:
            return checked
        asked = PreflightRequest(engine=checked.engine, need=checked.need, weights=request.weights)
        try:
            found = await calls.preflight(checked.candidate, asked)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            failure = failure_of(error, node=checked.candidate)
            late = workflow.time() - began >= calls.PREFLIGHT_WAIT_S
            # Jobs that began before failed here at once, and their histories say so.
            if failure.reason is not Reason.NODE_UNREACHABLE or late or not workflow.patched("preflight-again"):
                raise failed(failure) from error
            request = request.model_copy(update={"silent": (*others, checked.candidate)})
            continue
        if found.failure is not None:
            raise failed(found.failure)
        step.say(f"{checked.sentence}; {checked.candidate}: {_found(checked, found)}{waited}")
        return checked


def _found(checked: CheckResult, found: PreflightResult) -> str:
    installed = "installed" if found.engine_installed else "to be installed"
    return f"{checked.engine} {found.engine_version} {installed}, {size(found.free_memory)} free"

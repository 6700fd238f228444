"""Failures as data: what came back from a call, and what a workflow fails with itself."""

from temporalio.exceptions import ActivityError, ApplicationError, TimeoutType, is_cancelled_exception
from temporalio.exceptions import TimeoutError as ActivityTimeout

from fleet.reasons import Failure, Reason, read_failure


def failure_of(error: BaseException, *, node: str = "") -> Failure:
    """The cause of a failed call as data."""
    if isinstance(error, ActivityError) and error.cause is not None:
        return failure_of(error.cause, node=node)
    if is_cancelled_exception(error):
        return Failure(reason=Reason.CANCELLED, detail="it was cancelled", node=node)
    if isinstance(error, ActivityTimeout):
        if error.type in (TimeoutType.SCHEDULE_TO_START, TimeoutType.HEARTBEAT) and node:
            return Failure(reason=Reason.NODE_UNREACHABLE, detail=f"the agent of {node} does not answer", node=node)
        return Failure(reason=Reason.INTERNAL, detail=f"it took too long ({error.type and error.type.name})", node=node)
    if isinstance(error, ApplicationError):
        if error.details and isinstance(error.details[0], dict) and "reason" in error.details[0]:
            found = read_failure(error.details[0])
            if found is None:
                return Failure(reason=Reason.INTERNAL, detail=f"{error.type}: {error.message}", node=node)
            return found if found.node or not node else found.model_copy(update={"node": node})
        reason = Reason(error.type) if error.type in set(Reason) else Reason.INTERNAL
        return Failure(reason=reason, detail=error.message, node=node)
    return Failure(reason=Reason.INTERNAL, detail=str(error) or type(error).__name__, node=node)


def ended_ns(error: BaseException) -> int:
    """When the failed call ended where it ran, by that machine's clock; 0 where nobody said so."""
    cause = error.cause if isinstance(error, ActivityError) else error
    said = cause.details[1] if isinstance(cause, ApplicationError) and len(cause.details) > 1 else 0
    return said if isinstance(said, int) else 0


def failed(failure: Failure) -> ApplicationError:
    """A workflow's own failure: the type is the reason, the detail the Failure."""
    return ApplicationError(
        failure.sentence, failure.model_dump(mode="json"), type=failure.reason.value, non_retryable=True
    )

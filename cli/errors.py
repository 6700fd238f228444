"""What can go wrong for the operator: each error a command expects becomes one sentence on stderr, exit 1.

CtlError            a command cannot do what was asked
 ├─ JobFailedError  a job ended without success
 └─ PartEndedError  a part of the embedded system ended as it was started
PortTakenError      a port that was asked for is taken (cli/ports.py)
"""

import httpx
from pydantic import ValidationError
from temporalio import exceptions
from temporalio.client import WorkflowFailureError, WorkflowQueryFailedError, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from cli.ports import PortTakenError
from fleet.reasons import REASONS, Failure, LlmgwError, Reason
from runtime.config import ConfigError
from runtime.temporal import UnreachableError


class CtlError(Exception):
    """A command cannot do what was asked; the text is one sentence: what, where, what to do."""


class JobFailedError(CtlError):
    """A job ended without success; the text says at which step and why."""


class PartEndedError(CtlError):
    """A part of the embedded system ended as it was started; the text has the end of its log."""


EXPECTED = (
    CtlError,
    PortTakenError,
    UnreachableError,
    ConfigError,
    LlmgwError,
    RPCError,
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    exceptions.FailureError,
    httpx.HTTPError,
    OSError,
)
"""Errors that are answers, not faults of ctl."""

UNANSWERED = (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
"""Of a call to Temporal that came to nothing, because Temporal or who was to answer is away."""


def sentence(error: BaseException) -> str:
    """What the operator reads."""
    if isinstance(error, LlmgwError):
        failure = error.failure
        # Bad input that ctl itself refuses: its detail says what to write, and there is no job to start again.
        return failure.detail if failure.reason is Reason.BAD_INPUT else failure.sentence
    if isinstance(error, (WorkflowFailureError, WorkflowUpdateFailedError)):
        return sentence(error.cause)
    if isinstance(error, exceptions.FailureError):
        return _of_failure(error)
    if isinstance(error, RPCError):
        return _of_rpc(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def failure_of(error: BaseException | None) -> Failure | None:
    """The named failure in an error that came through Temporal, at whatever depth it stands."""
    while error is not None:
        if isinstance(error, LlmgwError):
            return error.failure
        if isinstance(error, exceptions.ApplicationError) and error.type in REASONS:
            return _named(error, Reason(error.type))
        error = error.cause if isinstance(error, (WorkflowFailureError, exceptions.FailureError)) else None
    return None


def _named(error: exceptions.ApplicationError, reason: Reason) -> Failure:
    try:
        return Failure.model_validate(error.details[0] if error.details else None)
    except ValidationError:
        return Failure(reason=reason, detail=error.message)


def _of_failure(error: exceptions.FailureError) -> str:
    failure = failure_of(error)
    if failure is not None:
        return failure.sentence
    if isinstance(error, exceptions.CancelledError):
        return "it was cancelled"
    if isinstance(error, exceptions.TerminatedError):
        return "it was terminated"
    if isinstance(error, exceptions.TimeoutError):
        return "it took longer than its timeout"
    return sentence(error.cause) if isinstance(error.cause, exceptions.FailureError) else error.message


def _of_rpc(error: RPCError) -> str:
    if error.status in UNANSWERED:
        return "Temporal or its worker did not answer in time: look at `ctl status`"
    return error.message

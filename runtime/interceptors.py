"""What every activity gets without asking: a heartbeat while its process lives, and our errors as Temporal's."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry import trace
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.worker import (
    ActivityInboundInterceptor,
    ActivityOutboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

from fleet.metrics import ACTIVITIES
from fleet.reasons import LlmgwError, Reason
from runtime.instruments import histogram

log = logging.getLogger("llmgw.activity")

ATTEMPTS = histogram(ACTIVITIES)

BEAT_SHARE = 0.25
"""Of the heartbeat timeout, between beats. The SDK sends one each 0.8 of the timeout at most; more calls are free."""


class ActivityInterceptor(Interceptor):
    """On every worker, through the plugin."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Inbound(next)


class _Outbound(ActivityOutboundInterceptor):
    """Remembers what the activity last said, so that a beat in between does not take it back."""

    def __init__(self, next: ActivityOutboundInterceptor) -> None:
        super().__init__(next)
        self._said: tuple[Any, ...] = ()

    def heartbeat(self, *details: Any) -> None:
        self._said = details
        super().heartbeat(*details)

    def again(self) -> None:
        super().heartbeat(*self._said)


class _Inbound(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor) -> None:
        super().__init__(next)
        self._outbound: _Outbound | None = None

    def init(self, outbound: ActivityOutboundInterceptor) -> None:
        self._outbound = _Outbound(outbound)
        super().init(self._outbound)

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        labels = {"llmgw.activity": info.activity_type}
        began = time.monotonic()
        try:
            async with self._beating():
                answer = await super().execute_activity(input)
        except BaseException as error:
            ATTEMPTS.record(time.monotonic() - began, {**labels, "error.type": kind_of(error)})
            if not isinstance(error, LlmgwError):
                raise
            log.warning("%s of %s: %s", info.activity_type, info.workflow_id, error.failure.line)
            raise application_error(error) from error
        ATTEMPTS.record(time.monotonic() - began, labels)
        return answer

    @contextlib.asynccontextmanager
    async def _beating(self) -> AsyncIterator[None]:
        """Beat for as long as the activity runs: what a killed worker did is then tried again within the timeout."""
        timeout = activity.info().heartbeat_timeout
        if timeout is None or not timeout.total_seconds():
            yield
            return
        beat = asyncio.create_task(self._beat(timeout.total_seconds() * BEAT_SHARE))
        try:
            yield
        finally:
            beat.cancel()

    async def _beat(self, seconds: float) -> None:
        while self._outbound is not None:
            self._outbound.again()
            await asyncio.sleep(seconds)


def kind_of(error: BaseException) -> str:
    """What failed, in one of few words: the reason where it has a name, else the kind of exception."""
    if isinstance(error, LlmgwError):
        return error.failure.reason.value
    if isinstance(error, asyncio.CancelledError):
        return Reason.CANCELLED.value
    return (error.type if isinstance(error, ApplicationError) else None) or type(error).__name__


def ended_ns() -> int:
    """Now, for an answer whose sender's trace should know when it was given; 0 where this call has no trace."""
    return time.time_ns() if trace.get_current_span().get_span_context().is_valid else 0


def application_error(error: LlmgwError) -> ApplicationError:
    """The failure as Temporal carries it: type = reason, and as details the Failure and the time in nanoseconds.

    Benign, so that the SDK does not log a stack trace for what has a name; our own line was logged already.
    """
    failure = error.failure
    return ApplicationError(
        failure.detail,
        failure.model_dump(mode="json"),
        ended_ns(),
        type=failure.reason.value,
        # A wait that was asked for is the workflow's, which shows it.
        non_retryable=not failure.retryable or failure.retry_after_s > 0,
        category=ApplicationErrorCategory.BENIGN,
    )

"""A cancellation of a workflow, where the SDK would lose it or where it comes too late."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import is_cancelled_exception

KEPT = "cancel-kept"
"""Patch: a cancellation that the SDK took back counts."""

TOO_LATE = "cancel-too-late"
"""Patch: a cancellation that comes while a job tells that it is over changes nothing."""

ResultT = TypeVar("ResultT")


async def or_cancelled(call: Awaitable[ResultT]) -> ResultT:
    """The result of a call, or the cancellation of the workflow that was asked for meanwhile.

    The SDK takes a cancellation back where what it was to end comes to its own end: a signal that was sent already, or
    an activity that is done before it hears of it. The workflow then goes on as if nobody had cancelled it. For a
    workflow's main task alone: what else it runs is cancelled by the main task. Raises asyncio.CancelledError, and what
    the call raises.
    """
    before = workflow.cancellation_reason()

    def came() -> bool:
        return before is None and workflow.cancellation_reason() is not None and workflow.patched(KEPT)

    try:
        result = await call
    except Exception as error:
        if workflow.is_failure_exception(error) and not is_cancelled_exception(error) and came():
            raise asyncio.CancelledError from error
        raise
    if came():
        raise asyncio.CancelledError
    return result


async def to_the_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of something that a cancellation must not keep from being done, and which it comes too late for."""
    task = asyncio.ensure_future(work)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Anything but the workflow's own cancellation is not ours to outlive.
            if workflow.cancellation_reason() is None or not workflow.patched(TOO_LATE):
                raise

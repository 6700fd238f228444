"""Heartbeats of an activity that waits: how Temporal sees that it lives, and how a cancellation reaches it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from temporalio import activity

INTERVAL_S = 1.0
"""A person watches the numbers in the web UI; the SDK sends fewer to the server where the timeout is longer."""


@asynccontextmanager
async def beating(detail: Callable[[], Mapping[str, int]]) -> AsyncIterator[None]:
    """While the block runs, send `detail()` at once and then every second."""
    task = asyncio.create_task(_beat(detail))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _beat(detail: Callable[[], Mapping[str, int]]) -> None:
    while True:
        activity.heartbeat(dict(detail()))
        await asyncio.sleep(INTERVAL_S)

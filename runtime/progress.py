"""Heartbeats that carry how far an activity is; that it lives at all, `runtime/interceptors.py` tells by itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from temporalio import activity

INTERVAL_S = 0.5
"""A person watches the numbers in the web UI and in ctl; the SDK sends fewer where the timeout is longer."""


@asynccontextmanager
async def reporting(detail: Callable[[], object]) -> AsyncIterator[None]:
    """While the block runs, send `detail()` with a heartbeat at once and then twice a second."""
    task = asyncio.create_task(_report(detail))
    try:
        yield
    finally:
        task.cancel()


async def _report(detail: Callable[[], object]) -> None:
    while True:
        activity.heartbeat(detail())
        await asyncio.sleep(INTERVAL_S)

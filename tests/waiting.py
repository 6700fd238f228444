"""Waiting for a condition, never for luck."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")

POLL_S = 0.02


async def throughout(seconds: float, look: Callable[[], None]) -> None:
    """Look for so long, where what is tested is that something does not come; `look` asserts it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        look()
        await asyncio.sleep(POLL_S / 2)


@overload
async def until(condition: Callable[[], Awaitable[T | None]], timeout: float = 10.0) -> T: ...
@overload
async def until(condition: Callable[[], T | None], timeout: float = 10.0) -> T: ...
async def until(condition: Callable[[], object], timeout: float = 10.0) -> object:
    """What `condition` returns once it is true; fails after `timeout` seconds with what it returned last."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not true within {timeout:g} s, last: {value!r}"
        await asyncio.sleep(POLL_S)

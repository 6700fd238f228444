"""Blocking calls from the event loop: in a thread that is waited for, or in one that can be left behind."""

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread. A thread cannot be stopped, so a cancelled caller waits until it is done."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True  # the caller closes the descriptor next: not while the thread may still write to it
    if cancelled and not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as lost
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def abandonable(function: Callable[[], T], abandon: Callable[[], None]) -> T:
    """Run a blocking call that may hang on a network in a thread of its own.

    A cancelled caller calls `abandon`, which should make the call end soon, and does not wait for it: what the call
    still writes to must be given up too. The thread holds up no process's end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 -- handed over to the caller, whatever it is
            _tell(loop, functools.partial(_fail, done, error))
        else:
            _tell(loop, functools.partial(_end, done, result))

    threading.Thread(target=work, name="transfer", daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        abandon()
        raise


def _tell(loop: asyncio.AbstractEventLoop, how: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(how)


def _end(done: "asyncio.Future[T]", result: T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: "asyncio.Future[T]", error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)

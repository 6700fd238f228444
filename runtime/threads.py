"""Blocking calls from the event loop: in a thread that is waited for, or in one that can be left behind."""

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread. A thread cannot be stopped, so a cancelled caller waits until it is done."""
    return await stoppable(functools.partial(function, *args, **kwargs), lambda: None)


async def stoppable(function: Callable[[], T], stop: Callable[[], None]) -> T:
    """The same with a call that ends soon once `stop` was called: a cancelled caller calls it, and waits."""
    call: Callable[[], T] = functools.partial(contextvars.copy_context().run, function)
    # A future and no task: an event loop that ends cancels all tasks, and a task would be over before its thread.
    work = asyncio.get_running_loop().run_in_executor(None, call)
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            stop()
            cancelled = True  # the caller closes the descriptor next: not while the thread may still write to it
    if cancelled:
        work.exception()  # looked at, so that asyncio does not report it as lost
        raise asyncio.CancelledError
    return work.result()


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

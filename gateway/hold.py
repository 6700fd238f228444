"""Holds requests for a model that no replica serves, while the fleet is asked for one and starts it."""

import asyncio
import logging
import time
from typing import Protocol

from starlette.types import Receive

from activities.contract import Route
from fleet.metrics import HELD
from gateway.client import unless_gone
from gateway.errors import BarredError, NotReadyError, UnknownModelError
from gateway.routes import RoutesUnknownError, RouteTable
from runtime.instruments import gauge

WANTED_EVERY_S = 5.0
"""The fleet is told again while somebody waits, so that the model is not idle; oftener would only cost events."""
LOOK_S = 0.25
"""A small model is ready half a second after it was placed. One question serves all who wait."""
MAX_HELD = 1000
MAX_HELD_BYTES = 256 * 1024**2
"""Requests that wait are held in memory with their bodies, most of them a few kilobytes."""

log = logging.getLogger(__name__)


class Caller(Protocol):
    """Whoever can ask the fleet for a model."""

    async def wanted(self, model: str) -> None:
        """Say that somebody asks for a model without a replica. Raises RoutesUnknownError."""


class Hold:
    """All requests that wait for a model to start, for at most `wait_s` seconds each."""

    def __init__(self, table: RouteTable, caller: Caller, wait_s: float, *, max_held: int = MAX_HELD) -> None:
        self._table = table
        self._caller = caller
        self._wait_s = wait_s
        self._max_held = max_held
        self._called_at: dict[str, float] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self.held = 0
        """Requests that wait now."""
        self._bytes = 0
        gauge(HELD, lambda: [(self.held, {})])

    async def ready(self, route: Route, size: int, receive: Receive) -> Route:
        """The model's route once it has an endpoint; `size` is the bytes of the request that waits.

        Raises NotReadyError when the time is up or too many wait, BarredError when waiting cannot help,
        UnknownModelError when the model is removed meanwhile, and ClientGoneError.
        """
        _refuse_barred(route)
        self._call(route.model)
        if self._wait_s <= 0:
            raise _not_ready(route)
        if self.held >= self._max_held or self._bytes + size > MAX_HELD_BYTES:
            raise NotReadyError(
                "too_many_waiting",
                f"{route.model} is not ready, and {self.held} requests wait already: try again later",
            )
        self.held += 1
        self._bytes += size
        try:
            return await unless_gone(receive, self._wait(route.model))
        finally:
            self.held -= 1
            self._bytes -= size

    async def _wait(self, model: str) -> Route:
        deadline = time.monotonic() + self._wait_s
        while True:
            route = await self._table.find(model, max_age_s=LOOK_S)
            if route is None:
                raise UnknownModelError(model, [known.model for known in self._table.all()])
            if route.endpoints:
                return route
            _refuse_barred(route)
            left = deadline - time.monotonic()
            if left <= 0:
                raise _not_ready(route)
            self._call(model)
            await asyncio.sleep(min(LOOK_S, left))

    def _call(self, model: str) -> None:
        """Tell the fleet, unless it was told just now. Nobody waits for that: a Temporal that is away takes seconds."""
        now = time.monotonic()
        self._called_at = {name: at for name, at in self._called_at.items() if now - at < WANTED_EVERY_S}
        if model not in self._called_at:
            self._called_at[model] = now
            call = asyncio.create_task(self._tell(model))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _tell(self, model: str) -> None:
        try:
            await self._caller.wanted(model)
        except RoutesUnknownError as error:
            log.warning("%s is asked for, and the fleet cannot be told: %s", model, error)


def _refuse_barred(route: Route) -> None:
    if route.barred:
        raise BarredError(route.model, route.barred)


def _not_ready(route: Route) -> NotReadyError:
    why = route.waiting or "no replica is ready yet"
    return NotReadyError("model_not_ready", f"{route.model} cannot answer now: {why}")

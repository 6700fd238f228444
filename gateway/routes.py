"""Which models there are and where they can be reached, kept fresh from the Fleet workflow; and the way to ask it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import TemporalError
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import (
    QUERY_ROUTES,
    ROUTES_STALE_S,
    SIGNAL_WANTED,
    NameArg,
    Route,
    Routes,
    fleet_id,
)
from gateway.balance import Balance
from runtime.temporal import UnreachableError, connect

POLL_S = 1.0
"""A replica that went away is also found by the refused connection, so a second is soon enough; one query is 3 ms."""
MISS_INTERVAL_S = 0.05
"""At most twenty questions a second on misses, however many requests name models that do not exist."""
ANSWER_S = 2.0
"""A query takes milliseconds while a worker runs; without one it would wait for the SDK's ten seconds."""
REACH_S = 3.0
"""For the whole question: the SDK tries an unreachable server again for nine seconds, and clients wait for a miss."""

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class RoutesUnknownError(Exception):
    """The routes cannot be read now; the text is one sentence that says why."""


class RouteSource(Protocol):
    """Where the routes come from."""

    async def routes(self) -> Routes:
        """All routes now. Raises RoutesUnknownError."""


class FleetRoutes:
    """One cell's Fleet; connects to Temporal on first use, and again until it is there."""

    def __init__(self, cell: str) -> None:
        self._cell = cell
        self._client: Client | None = None

    async def routes(self) -> Routes:
        timeout = timedelta(seconds=ANSWER_S)
        found = await self._ask(lambda fleet: fleet.query(QUERY_ROUTES, result_type=Routes, rpc_timeout=timeout))
        return found or Routes(routes=())  # no Fleet yet: nothing was ever served here

    async def wanted(self, model: str) -> None:
        """Tell the fleet that somebody asks for a model that no replica serves. Raises RoutesUnknownError."""
        timeout = timedelta(seconds=ANSWER_S)
        await self._ask(lambda fleet: fleet.signal(SIGNAL_WANTED, NameArg(name=model), rpc_timeout=timeout))

    async def _ask(self, ask: Callable[[WorkflowHandle[Any, Any]], Awaitable[AnswerT]]) -> AnswerT | None:
        """What Fleet answers; None where there is no Fleet."""
        try:
            async with asyncio.timeout(REACH_S):
                if self._client is None:
                    self._client = await connect()
                return await ask(self._client.get_workflow_handle(fleet_id(self._cell)))
        except UnreachableError as error:
            raise RoutesUnknownError(str(error)) from error
        except TimeoutError as error:
            raise RoutesUnknownError(self._silent()) from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            if error.status in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
                raise RoutesUnknownError(self._silent()) from error
            raise RoutesUnknownError(f"Temporal answers {error.status.name.lower()}: {error.message}") from error
        except TemporalError as error:
            raise RoutesUnknownError(f"{fleet_id(self._cell)} does not answer: {error}") from error

    def _silent(self) -> str:
        # From here a server that is away and one without a worker look the same.
        return f"{fleet_id(self._cell)} does not answer: does Temporal run, and worker.py?"


class RouteTable:
    """The last known routes. They stay while Temporal is away: engines serve without it."""

    def __init__(self, source: RouteSource, balance: Balance) -> None:
        self._source = source
        self._balance = balance
        self._routes: dict[str, Route] = {}
        self._asked_at = float("-inf")
        self._fresh_at = float("-inf")
        self._asking = asyncio.Lock()
        self.trouble = "the routes have not been read yet"
        """Why the last reading failed; empty while the table is fresh."""

    def all(self) -> tuple[Route, ...]:
        """Every model in the catalog, by name."""
        return tuple(self._routes[name] for name in sorted(self._routes))

    @property
    def stale(self) -> bool:
        """Whether a replica on these routes may have been drained since."""
        return time.monotonic() - self._fresh_at > ROUTES_STALE_S

    async def find(self, model: str, max_age_s: float = 0.0) -> Route | None:
        """The model's route; where there is none or it has no endpoint, the source is asked again first.

        Not where it was asked less than `max_age_s` ago: many who wait for the same then ask together. A route that
        is stale is read again too: its engine may have been drained since. While that fails it is used all the same.
        """
        route = self._routes.get(model)
        missing = route is None or not route.endpoints
        age = time.monotonic() - self._asked_at
        if (age >= max_age_s) if missing else (self.stale and not self.trouble):
            await self.refresh()
        return self._routes.get(model)

    async def refresh(self) -> None:
        """Ask the source, unless somebody else's question that began after this call has been answered meanwhile."""
        wanted_at = time.monotonic()
        async with self._asking:
            if self._asked_at >= wanted_at:
                return
            await asyncio.sleep(self._asked_at + MISS_INTERVAL_S - wanted_at)
            self._asked_at = time.monotonic()
            try:
                routes = await self._source.routes()
            except RoutesUnknownError as error:
                self._note(str(error))
                return
            self._note("")
            self._fresh_at = self._asked_at
            self._routes = {route.model: route for route in routes.routes}
            self._balance.forget_except({endpoint for route in routes.routes for endpoint in route.endpoints})

    async def poll(self) -> None:
        """Keep the table fresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    def _note(self, trouble: str) -> None:
        if trouble != self.trouble:  # said once, not each second
            log.warning("routes: %s", trouble or "fresh again") if trouble else log.info("routes: fresh")
        self.trouble = trouble

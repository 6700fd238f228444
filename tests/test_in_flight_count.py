"""The count of requests that is made at vLLM's door, by messages given by hand."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from agent.engines.beside.llmgw_in_flight import InFlight
from tests.waiting import until

POST = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}


class Door:
    """One talk with an app behind the middleware, each message of it by hand."""

    def __init__(self, registry: CollectorRegistry, middleware: InFlight) -> None:
        self._registry = registry
        self._middleware = middleware
        self.to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.client_takes = asyncio.Event()
        self.client_takes.set()

    @property
    def count(self) -> float | None:
        return self._registry.get_sample_value("llmgw_requests_in_flight")

    @property
    def answered(self) -> float | None:
        return self._registry.get_sample_value("llmgw_oldest_answered_total")

    def begin(self, scope: dict[str, Any]) -> asyncio.Task[None]:
        async def send(message: Any) -> None:
            await self.client_takes.wait()

        return asyncio.create_task(self._middleware(scope, self.to_app.get, send))

    async def counts(self, wanted: int) -> None:
        await until(lambda: self.count == wanted, 5)


class App:
    """Reads a body to its end and sends what it is told to; an exception among that is raised."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.began = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.began += 1
        while (await receive()).get("more_body", False):
            pass
        while isinstance(answer := await self.answers.get(), dict):
            await send(answer)
        if answer is not None:
            raise answer


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def door(app: App) -> Door:
    registry = CollectorRegistry()
    return Door(registry, InFlight(app, registry))


BODY = {"type": "http.request", "body": b"{}", "more_body": False}
PART = {"type": "http.request", "body": b"{", "more_body": True}
HEAD = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"x", "more_body": True}
LAST = {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_request_counts_from_its_last_byte_to_its_answers(door: Door, app: App) -> None:
    talks = [door.begin(POST) for _ in range(3)]
    door.to_app.put_nowait(PART)
    await until(lambda: app.began == 3 and door.to_app.empty())
    assert door.count == 0, "a client that does not ask to the end is no work"
    for _ in talks:
        door.to_app.put_nowait(BODY)
    await door.counts(3)
    for answer in (HEAD, PIECE, PIECE):
        app.answers.put_nowait(answer)
    await until(app.answers.empty)
    assert door.count == 3, "the rest of an answer is waited for"
    app.answers.put_nowait(LAST)
    await door.counts(2)
    for _ in talks:
        app.answers.put_nowait(None)
    await asyncio.gather(*talks)
    assert door.count == 0


async def test_an_answer_that_its_client_does_not_take_is_none_that_waits(door: Door, app: App) -> None:
    talk = door.begin(POST)
    door.to_app.put_nowait(BODY)
    await door.counts(1)
    door.client_takes.clear()
    app.answers.put_nowait(HEAD)
    await door.counts(0)
    door.client_takes.set()
    await door.counts(1)
    app.answers.put_nowait(None)
    await talk
    assert door.count == 0


async def test_however_it_ends_it_counts_no_more(door: Door, app: App) -> None:
    failing, dropped = door.begin(POST), door.begin(POST)
    for _ in range(2):
        door.to_app.put_nowait(BODY)
    await door.counts(2)
    app.answers.put_nowait(RuntimeError("its own"))
    with pytest.raises(RuntimeError, match="its own"):
        await failing
    assert door.count == 1
    dropped.cancel()
    await asyncio.wait([dropped])
    assert door.count == 0


async def test_what_is_answered_before_what_waits_longer_says_nothing(door: Door, app: App) -> None:
    async def ask(waiting: int) -> asyncio.Task[None]:
        talk = door.begin(POST)
        door.to_app.put_nowait(BODY)
        await door.counts(waiting)
        return talk

    oldest, later = await ask(1), await ask(2)
    app.answers.put_nowait(None)  # the first to read has it: it goes without an answer
    await oldest
    assert door.answered == 0
    app.answers.put_nowait(HEAD)
    app.answers.put_nowait(PIECE)
    await until(app.answers.empty)
    assert door.answered == 0, "a stream begins before its core has done anything"
    app.answers.put_nowait(LAST)
    await until(lambda: door.answered == 1)
    app.answers.put_nowait(None)
    await later
    assert door.answered == 1


async def test_an_answer_beside_one_that_waits_longer_says_nothing() -> None:
    """As a refusal beside what a core that hangs does not answer."""

    async def some(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["path"] == "/refused":
            await send(HEAD)
            await send(LAST)
        else:
            await asyncio.Event().wait()

    registry = CollectorRegistry()
    door = Door(registry, InFlight(some, registry))
    for _ in range(2):
        door.to_app.put_nowait(BODY)
        await door.begin({**POST, "path": "/refused"})
    assert (door.count, door.answered) == (0, 2)
    hangs = door.begin(POST)
    door.to_app.put_nowait(BODY)
    await door.counts(1)
    door.to_app.put_nowait(BODY)
    await door.begin({**POST, "path": "/refused"})
    assert (door.count, door.answered) == (1, 2)
    hangs.cancel()
    await asyncio.wait([hangs])


async def test_an_answer_to_who_has_gone_says_nothing(door: Door) -> None:
    async def gone(scope: Any, receive: Any, send: Any) -> None:
        """As vLLM does when it sees its client go: it answers null."""
        while (await receive())["type"] != "http.disconnect":
            pass
        await send(HEAD)
        await send(LAST)

    registry = CollectorRegistry()
    left = Door(registry, InFlight(gone, registry))
    talk = left.begin(POST)
    left.to_app.put_nowait(BODY)
    await left.counts(1)
    left.to_app.put_nowait({"type": "http.disconnect"})
    await talk
    assert (left.count, left.answered) == (0, 0)


@pytest.mark.parametrize("scope", [{**POST, "method": "GET"}, {"type": "lifespan"}, {"type": "websocket", "path": "/"}])
async def test_only_what_asks_the_model_counts(door: Door, app: App, scope: dict[str, Any]) -> None:
    talk = door.begin(scope)
    door.to_app.put_nowait(BODY)
    await until(lambda: app.began == 1 and door.to_app.empty())
    assert door.count == 0
    app.answers.put_nowait(None)
    await talk
    assert door.count == 0

"""Clients that stream answers from an OpenAI-compatible server, and whether each got all of its own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

from activities.streamed import lines_of
from tests.waiting import until

PATIENCE_S = 90.0
"""For an answer: one may wait until a replica has moved or has been started anew."""


@dataclass
class Stream:
    """One request: whether its answer has begun, how many pieces came, and whether the end was said."""

    begun: bool = False
    pieces: int = 0
    whole: bool = False

    async def run(self, http: httpx.AsyncClient, endpoint: str, tokens: int) -> None:
        """Ask, and read to the end. Without chance: by chance the tiny checkpoint also says that it has ended."""
        message = {"role": "user", "content": "hi"}
        body = {"model": "tiny", "messages": [message], "max_tokens": tokens, "temperature": 0, "stream": True}
        async with http.stream("POST", f"{endpoint}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.begun = True
            async for line in lines_of(answer):
                if line == "data: [DONE]":
                    self.whole = True
                elif line.startswith("data: ") and json.loads(line[6:]).get("choices"):
                    self.pieces += 1


def begin(endpoint: str, count: int, tokens: int) -> tuple[list[Stream], "asyncio.Future[None]"]:
    """So many at once; the future ends with the last."""
    streams = [Stream() for _ in range(count)]

    async def run() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            await asyncio.gather(*(one.run(http, endpoint, tokens) for one in streams))

    return streams, asyncio.ensure_future(run())


class Clients:
    """Clients that ask again and again; `done` counts whole answers, `lost` says what went wrong with the others."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._tokens = tokens
        self.done = 0
        self.lost: list[str] = []

    async def ask(self, http: httpx.AsyncClient) -> None:
        """One of them, until cancelled."""
        message = {"role": "user", "content": "Hello."}
        body = {"model": "tiny", "stream": True, "max_tokens": self._tokens, "messages": [message]}
        while True:
            try:
                async with http.stream("POST", self._url, json=body) as answer:
                    text = (await answer.aread()).decode()
            except httpx.TransportError as error:
                self.lost.append(repr(error))
                continue
            if answer.status_code == 200 and text.rstrip().endswith("data: [DONE]"):
                self.done += 1
            else:
                self.lost.append(f"{answer.status_code}: {text[-300:]}")

    async def more(self, answers: int) -> None:
        """Wait for so many more."""
        before = self.done
        await until(lambda: self.done >= before + answers, PATIENCE_S)


@contextlib.asynccontextmanager
async def asking(url: str, clients: int = 2, *, tokens: int = 2) -> AsyncIterator[Clients]:
    """So many clients ask there without pause; those that wait at the end are dropped."""
    made = Clients(url, tokens)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        tasks = [asyncio.create_task(made.ask(http)) for _ in range(clients)]
        try:
            await made.more(clients)
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled(), task.exception()

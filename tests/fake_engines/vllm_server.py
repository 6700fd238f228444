"""vLLM as two processes seen from outside: a server that answers, and a core that may hang behind it.

As in vLLM 0.32.0, measured: its gauges are set with each step that the core finishes, and by nothing else. Run with
vLLM's own flags; the middleware they name is taken as vLLM takes it. `POST /freeze/1` lets the core hang between two
steps, `/freeze/0` lets it go on; `size` in a request makes its tokens so many bytes long.
"""

import argparse
import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import REGISTRY, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

STEP_S = 0.01
PROMPT = 19
LABELS = ("model_name", "engine")


@dataclass
class Asked:
    """One request in the core."""

    left: int
    """Tokens."""
    made: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)
    """One for each token: whether more come."""
    read: bool = False


class Core:
    """Works on so many requests at a time, and says after each step what it has."""

    def __init__(self, slots: int) -> None:
        self.requests: list[Asked] = []
        self.moving = asyncio.Event()
        self.moving.set()
        self.work = asyncio.Event()
        self._slots = slots
        self._gauges = [
            Gauge(f"vllm:num_requests_{state}", state, LABELS).labels("tiny", "0") for state in ("running", "waiting")
        ]
        self._counters = [
            Counter(f"vllm:{kind}_tokens", kind, LABELS).labels("tiny", "0") for kind in ("prompt", "generation")
        ]

    async def run(self) -> None:
        """Step as long as there is work."""
        while True:
            await self.work.wait()
            await self.moving.wait()
            batch = self.requests[: self._slots]
            await asyncio.sleep(STEP_S)
            await self.moving.wait()
            for one in batch:
                self._step(one)
            self.requests = [one for one in self.requests if one.left]
            running = min(len(self.requests), self._slots)
            for gauge, number in zip(self._gauges, (running, len(self.requests) - running), strict=True):
                gauge.set(number)
            if not self.requests:
                self.work.clear()

    def _step(self, one: Asked) -> None:
        if not one.left:
            return  # given up meanwhile
        prompt, generation = self._counters
        if not one.read:
            one.read = True
            prompt.inc(PROMPT)
        generation.inc()
        one.left -= 1
        one.made.put_nowait(one.left > 0)


def application(core: Core, middleware: list[str]) -> Starlette:
    """The server."""

    async def health(request: Request) -> Response:
        return PlainTextResponse("")

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(generate_latest(REGISTRY))

    async def freeze(request: Request) -> Response:
        (core.moving.clear if request.path_params["how"] else core.moving.set)()
        return PlainTextResponse("")

    async def complete(request: Request) -> Response:
        body = await request.json()
        if body.get("refused"):  # as what is too long: seen by the server, which takes its time for it
            await asyncio.sleep(STEP_S)
            return PlainTextResponse("", status_code=400)
        asked = Asked(left=int(body["max_tokens"]))
        core.requests.append(asked)
        core.work.set()
        return StreamingResponse(pieces(asked, "x" * int(body.get("size", 1))), media_type="text/event-stream")

    async def pieces(asked: Asked, text: str) -> AsyncIterator[str]:
        try:
            more = True
            while more:
                more = await asked.made.get()
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            asked.left = 0  # a client that went away is told to the core, which lets go of it in its next step

    made = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/freeze/{how:int}", freeze, methods=["POST"]),
            Route("/v1/chat/completions", complete, methods=["POST"]),
        ]
    )
    for path in middleware:
        module, name = path.rsplit(".", 1)
        made.add_middleware(getattr(importlib.import_module(module), name))
    return made


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--max-num-seqs", required=True, type=int)
    parser.add_argument("--middleware", action="append", default=[])
    given, _ = parser.parse_known_args()
    core = Core(given.max_num_seqs)
    stepping = asyncio.create_task(core.run())
    config = uvicorn.Config(application(core, given.middleware), host=given.host, port=given.port, log_level="warning")
    await uvicorn.Server(config).serve()
    stepping.cancel()


if __name__ == "__main__":
    asyncio.run(main())

"""What the gateway's tests stand it between: routes as a test sets them, and engines that answer on free ports."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Path_

from activities.contract import Route, Routes
from gateway.app import build_app
from gateway.balance import Balance
from gateway.hold import MAX_HELD, Hold
from gateway.relay import Relay, relay_client
from gateway.routes import RoutesUnknownError, RouteTable
from runtime.engine_keys import EngineKeys
from tests.waiting import until


class Source:
    """Routes as a test sets them."""

    def __init__(self) -> None:
        self.now: dict[str, Route] = {}
        self.trouble = ""
        self.asked = 0
        self.called: list[str] = []
        """Models that were asked for without a replica."""

    def set(self, model: str, *endpoints: str, waiting: str = "") -> None:
        self.now[model] = Route(model=model, endpoints=endpoints, waiting=waiting)

    def bar(self, model: str, why: str) -> None:
        self.now[model] = Route(model=model, endpoints=(), barred=why)

    async def routes(self) -> Routes:
        self.asked += 1
        await asyncio.sleep(0)
        if self.trouble:
            raise RoutesUnknownError(self.trouble)
        return Routes(routes=tuple(self.now.values()))

    async def wanted(self, model: str) -> None:
        self.called.append(model)
        await asyncio.sleep(0)
        if self.trouble:
            raise RoutesUnknownError(self.trouble)


class Engine:
    """A fake engine: answers with its name, streams as long as its gate says, and notes what reached it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[tuple[dict[str, str], str, bytes]] = []
        self.gate = asyncio.Event()
        self.streaming = 0
        self.cancelled = 0

    def app(self) -> Starlette:
        return Starlette(routes=[Path_("/v1/{path:path}", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.requests.append((dict(request.headers), target, body))
        asked = json.loads(body)
        if asked.get("stream"):
            return StreamingResponse(self.tokens(), media_type="text/event-stream")
        if asked.get("slow"):
            return await self.slow(request)
        if asked.get("status"):
            return JSONResponse({"error": "engine says no"}, status_code=asked["status"])
        return JSONResponse({"engine": self.name}, headers={"x-engine": self.name, "keep-alive": "timeout=9"})

    async def tokens(self) -> AsyncIterator[bytes]:
        self.streaming += 1
        try:
            yield b'data: {"token": 1}\n\n'
            await self.gate.wait()
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.streaming -= 1

    async def slow(self, request: Request) -> Response:
        await until(request.is_disconnected)
        self.cancelled += 1
        return Response()


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    """The app on a free port, by uvicorn in this loop."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@asynccontextmanager
async def answering_once(reply: bytes) -> AsyncIterator[str]:
    """A server that reads a request, sends these bytes and cuts the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class Front:
    """A running gateway with its parts within reach."""

    def __init__(self, url: str, source: Source, balance: Balance, table: RouteTable, hold: Hold) -> None:
        self.url = url
        self.source = source
        self.balance = balance
        self.table = table
        self.hold = hold
        self.client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=10)

    async def chat(self, model: str, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"model": model, **more})


@asynccontextmanager
async def gateway(
    wait_for_start_s: float = 0, max_held: int = MAX_HELD, keys: EngineKeys | None = None
) -> AsyncIterator[Front]:
    source, balance = Source(), Balance(time.monotonic)
    table = RouteTable(source, balance)
    hold = Hold(table, source, wait_for_start_s, max_held=max_held)
    client = relay_client(keys or EngineKeys())
    async with client, serving(build_app(table, Relay(client, balance), hold)) as url:
        front = Front(url, source, balance, table, hold)
        async with front.client:
            yield front


@asynccontextmanager
async def engine(name: str) -> AsyncIterator[tuple[Engine, str]]:
    fake = Engine(name)
    async with serving(fake.app()) as url:
        yield fake, url

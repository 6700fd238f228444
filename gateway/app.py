"""The paths of the front door: health, the list of models, and everything else under /v1 passed to a replica."""

import json
import re
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from activities.contract import Route
from gateway.client import ClientGoneError
from gateway.errors import (
    BadRequestError,
    GatewayError,
    NotReadyError,
    UnknownModelError,
    UnreachableError,
    http_error,
)
from gateway.exchange import Exchange
from gateway.hold import Hold
from gateway.relay import Relay, Wanted
from gateway.routes import RouteTable

MAX_BODY = 32 * 1024**2
"""Bytes. The longest prompts with pictures are far below it, and a body is held in memory while it is passed on."""

PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+")
"""Only paths that no engine can read as another one: no `..`, no escapes, no empty segments."""


def build_app(table: RouteTable, relay: Relay, hold: Hold) -> Starlette:
    """The front door as an ASGI application; whoever runs it also runs `table.poll()`."""

    async def health(_: Request) -> Response:
        if table.trouble:
            return JSONResponse({"status": "unavailable", "detail": table.trouble}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models(_: Request) -> Response:
        _need_routes(table)
        return JSONResponse({"object": "list", "data": [_model(route) for route in table.all()]})

    async def model(request: Request) -> Response:
        return JSONResponse(_model(await _route(table, request.path_params["model"])))

    return Starlette(
        routes=[
            Path("/health", health),
            Path("/v1/models", models),
            Path("/v1/models/{model:path}", model),
            Path("/v1/{path:path}", Door(table, relay, hold), methods=["POST"]),
        ],
        exception_handlers={GatewayError: _on_gateway_error, HTTPException: _on_http_error},
    )


class Door:
    """POST /v1/*: reads which model is meant and passes the request on, once a replica serves it."""

    def __init__(self, table: RouteTable, relay: Relay, hold: Hold) -> None:
        self._table = table
        self._relay = relay
        self._hold = hold
        self._tracer = trace.get_tracer("llmgw.gateway")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        began = time.time_ns()
        try:
            wanted = Wanted(target=_target(scope), headers=list(scope["headers"]), body=await _read(request))
            model = _model_name(wanted.body)
        except ClientDisconnect:
            return
        exchange = Exchange(scope["path"], model)
        parent = TraceContextTextMapPropagator().extract(request.headers)
        with self._tracer.start_as_current_span(
            "gateway request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes=exchange.attributes(scope["path"]),
            start_time=began,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                status = await self._pass_on(wanted, model, exchange, receive, send)
            except ClientGoneError:
                span.set_attribute("llmgw.client_gone", True)
                exchange.ended(span, 0, "client_gone")
                return
            except GatewayError as error:
                exchange.ended(span, error.status, error.code)
                if error.status >= 500:
                    span.set_status(trace.StatusCode.ERROR, str(error))
                await error.response()(scope, receive, send)
                return
            exchange.ended(span, status)
            if status >= 500:
                span.set_status(trace.StatusCode.ERROR, f"the engine answered {status}")

    async def _pass_on(self, wanted: Wanted, model: str, exchange: Exchange, receive: Receive, send: Send) -> int:
        found = await _route(self._table, model)
        exchange.known(found.model)
        route = await self._ready(wanted, found, receive)
        try:
            return await self._relay.pass_on(wanted, route, exchange.answer, receive, send)
        except UnreachableError:
            # They may have gone since the routes were read, as when the model went to zero just now.
            await self._table.refresh()
            fresh = await _route(self._table, model)
            if fresh.endpoints and set(fresh.endpoints) <= set(route.endpoints):
                raise
        route = await self._ready(wanted, fresh, receive)
        return await self._relay.pass_on(wanted, route, exchange.answer, receive, send)

    async def _ready(self, wanted: Wanted, route: Route, receive: Receive) -> Route:
        if route.endpoints:
            return route
        began = time.monotonic()
        try:
            return await self._hold.ready(route, len(wanted.body), receive)
        finally:
            trace.get_current_span().set_attribute("llmgw.held_s", round(time.monotonic() - began, 3))


def _target(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.split(b"?", 1)[0].decode("latin-1")
    if PLAIN_PATH.fullmatch(path) is None:
        raise BadRequestError(404, "not_found", "the path holds characters no API path has")
    query: bytes = scope["query_string"]
    return f"{path}?{query.decode('latin-1')}" if query else path


async def _read(request: Request) -> bytes:
    too_large = BadRequestError(413, "request_too_large", f"the body is larger than {MAX_BODY:,} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _model_name(body: bytes) -> str:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(400, "invalid_json", "the body is not JSON") from error
    if not isinstance(asked, Mapping):
        raise BadRequestError(400, "invalid_json", "the body is not a JSON object")
    model = asked.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequestError(400, "model_missing", "the body names no model: set the field model", param="model")
    return model


async def _route(table: RouteTable, model: str) -> Route:
    route = await table.find(model)
    if route is None:
        _need_routes(table)  # a name that was never read cannot be called unknown
        raise UnknownModelError(model, [known.model for known in table.all()])
    return route


def _need_routes(table: RouteTable) -> None:
    if table.trouble and not table.all():
        raise NotReadyError("routes_unknown", table.trouble)


def _model(route: Route) -> dict[str, object]:
    return {
        "id": route.model,
        "object": "model",
        "created": 0,  # the API wants a number; the catalog's dates are the operator's business
        "owned_by": "llmgw",
        "ready_replicas": len(route.endpoints),
    }


async def _on_gateway_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, GatewayError):
        raise error
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return http_error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)

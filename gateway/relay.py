"""One request on its way: to the best replica, on to another where that one cannot be reached, and back as a stream."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Receive, Send

from activities.contract import Route
from fleet.endpoints import server_of
from gateway.balance import Balance
from gateway.client import unless_gone
from gateway.errors import GatewayError, UnreachableError, UpstreamError
from gateway.exchange import Answer
from runtime.engine_keys import EngineAuth, EngineKeys

CONNECT_S = 3.0
"""A node answers a connection within milliseconds; one that lost its power never does."""
SILENCE_S = 600.0
"""The wait that OpenAI's own clients allow: a long prompt without streaming is silent until its end."""

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    # The clients' secrets are for this door, not for engines and their logs.
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
    # Written anew from the span of this request.
    b"traceparent",
    b"tracestate",
    b"baggage",
}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A client's request, read whole."""

    target: str
    """Path and query, as they came."""
    headers: Headers
    body: bytes


class Relay:
    """Passes requests on. `client` must not follow redirects nor read proxies from the environment."""

    def __init__(self, client: httpx.AsyncClient, balance: Balance) -> None:
        self._client = client
        self._balance = balance

    async def pass_on(self, wanted: Wanted, route: Route, answer: Answer, receive: Receive, send: Send) -> int:
        """Answer `wanted` from one of the route's endpoints; returns the status sent, and `answer` sees what passes.

        Raises GatewayError while nothing has been sent, and ClientGoneError, after the engine's request is closed.
        """
        return await unless_gone(receive, self._answer(wanted, route, answer, send))

    async def _answer(self, wanted: Wanted, route: Route, answer: Answer, send: Send) -> int:
        tried: set[str] = set()
        while (endpoint := self._balance.pick(route.endpoints, tried)) is not None:
            tried.add(endpoint)
            with self._balance.busy(endpoint):
                response = await self._open(wanted, route.model, endpoint)
                if response is None:
                    continue
                trace.get_current_span().set_attributes({**server_of(endpoint), "llmgw.attempts": len(tried)})
                try:
                    await _return(response, route.model, answer, send)
                finally:
                    await response.aclose()
                return response.status_code
        raise UnreachableError(route.model, len(tried))

    async def _open(self, wanted: Wanted, model: str, endpoint: str) -> httpx.Response | None:
        """The engine's answer up to its headers; None where no connection came about.

        Only that is tried elsewhere. A request that was sent may be what brought the engine down, and sent on it would
        take the next replica down too.
        """
        request = httpx.Request(
            "POST", endpoint.rstrip("/") + wanted.target, headers=_forwarded(wanted.headers), content=wanted.body
        )
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._balance.unreachable(endpoint)
            log.warning("%s: %s cannot be reached (%s)", model, endpoint, error or type(error).__name__)
            return None
        except httpx.TimeoutException as error:
            raise UpstreamError(504, "upstream_timeout", f"{model} sent nothing for {SILENCE_S:g} s") from error
        except httpx.TransportError as error:
            log.warning("%s: %s broke off before it answered (%s)", model, endpoint, error or type(error).__name__)
            raise UpstreamError(
                502, "upstream_broke_off", f"the replica of {model} broke off before it answered: try again"
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            # It is our key that is wrong: to the client this must not look like its own.
            await response.aclose()
            log.error("%s: %s asks for a key that engine_key_file of server.yaml does not have", model, endpoint)
            raise UpstreamError(
                502,
                "upstream_refused_key",
                f"the replica of {model} does not take the gateway's key: tell its operator",
            )
        return response


def relay_client(keys: EngineKeys) -> httpx.AsyncClient:
    """The HTTP client the relay needs, which shows the engines their key; close it at the end."""
    return httpx.AsyncClient(
        auth=EngineAuth(keys),
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
        # The engines limit what runs at once, and queue; a second limit here would only hide their queue. No connection
        # is used twice: engines close them when it suits them (llama.cpp after each stream, whatever its Keep-Alive
        # says; uvicorn after five idle seconds), and nobody can tell whether a request that was sent just then was
        # read. A new one costs less than a millisecond.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    )


def _forwarded(headers: Headers) -> Headers:
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    ours = [(name.encode(), value.encode()) for name, value in carrier.items()]
    # Whoever closes first keeps the connection's port for a minute. The engine has one port for all; the gateway has
    # 28,000 for each engine, and would be out of them at 470 requests a second.
    return [*_without(headers, NOT_FORWARDED), *ours, (b"connection", b"close")]


def _without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> Headers:
    lowered = [(name.lower(), value) for name, value in headers]
    listed = b",".join(value for name, value in lowered if name == b"connection")
    dropped = names | {name.strip().lower() for name in listed.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped]


async def _return(response: httpx.Response, model: str, answer: Answer, send: Send) -> None:
    headers = _without(response.headers.raw, NOT_RETURNED)
    answer.streamed = response.headers.get("content-type", "").startswith("text/event-stream")
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    try:
        async for chunk in response.aiter_raw():
            answer.saw(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except httpx.TransportError as error:
        # The status is out. A stream can still carry the error; any other body is cut, which its reader notices.
        log.warning("%s: the answer broke off (%s)", model, error or type(error).__name__)
        trace.get_current_span().set_status(trace.StatusCode.ERROR, "the answer broke off")
        answer.broke_off = True
        if answer.streamed:
            await send({"type": "http.response.body", "body": _broke_off(model).event(), "more_body": True})
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _broke_off(model: str) -> GatewayError:
    return UpstreamError(502, "upstream_broke_off", f"the replica of {model} broke off in the middle of its answer")

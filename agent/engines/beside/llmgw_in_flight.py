"""Counts the requests that wait for vLLM, where they come in; found by vLLM through `--middleware` and PYTHONPATH.

vLLM's own gauges say what its core told with the last step that it finished. What came since is not in them, and a
core that hangs tells nothing more: one that hung with nothing to do says for ever that nothing waits.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class InFlight:
    """ASGI middleware: a gauge among the engine's own, of requests that were read whole and wait for their answer.

    One that waits for its client, to ask to the end or to take what is there, says nothing of the engine.
    """

    def __init__(
        self, app: Callable[[Message, Receive, Send], Awaitable[None]], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._app = app
        help_text = "Requests that were read and wait for their answer or for the rest of it."
        # livesum: of all the server's processes, should there be several
        self._gauge = Gauge("llmgw_requests_in_flight", help_text, registry=registry, multiprocess_mode="livesum")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":  # what asks the model anything is a POST
            await self._app(scope, receive, send)
            return
        waits = Waits(self._gauge)

        async def reading() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                waits.change(to=True)
            return message

        async def sending(message: Message) -> None:
            waited = waits.now
            waits.change(to=False)
            await send(message)  # takes as long as the client does
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            waits.change(to=waited and not ended)

        try:
            await self._app(scope, reading, sending)
        finally:
            waits.change(to=False)


class Waits:
    """Whether one request waits for the engine now."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self.now = False

    def change(self, *, to: bool) -> None:
        """Say so; saying it again changes nothing."""
        if to != self.now:
            self.now = to
            self._gauge.inc(1 if to else -1)

"""Counts the requests that wait for vLLM, where they come in; found by vLLM through `--middleware` and PYTHONPATH.

vLLM's own gauges say what its core told with the last step that it finished. What came since is not in them, and a
core that hangs tells nothing more: one that hung with nothing to do says for ever that nothing waits. What vLLM
refuses never comes to its core, and so moves none of its gauges: a client that asks again and again for what it is
refused would look like a hang.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class InFlight:
    """ASGI middleware: among the engine's own numbers, the requests that were read whole and wait for their answer.

    One that waits for its client, to ask to the end or to take what is there, says nothing of the engine. And how many
    were answered that had waited longest: where a core hangs, what waits for it does, and all that is refused meanwhile
    came later.
    """

    def __init__(
        self, app: Callable[[Message, Receive, Send], Awaitable[None]], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._app = app
        help_text = "Requests that were read and wait for their answer or for the rest of it."
        # livesum: of all the server's processes, should there be several
        self._gauge = Gauge("llmgw_requests_in_flight", help_text, registry=registry, multiprocess_mode="livesum")
        help_text = "Answers that were finished, also a refusal, to the request that had waited longest."
        self._answers = Counter("llmgw_oldest_answered", help_text, registry=registry)
        self._asked: dict[object, bool] = {}
        """Those that are not answered to the end, in the order in which they were read: whether each waits now."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":  # what asks the model anything is a POST
            await self._app(scope, receive, send)
            return
        request = object()
        given_up = False

        async def reading() -> Message:
            nonlocal given_up
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._note(request, waits=True)
            given_up = given_up or message["type"] == "http.disconnect"
            return message

        async def sending(message: Message) -> None:
            waited = self._asked.get(request, False)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            # Not as it begins: a stream does before its core has done anything. And vLLM also answers who has gone
            # away, whom its core has told nothing.
            if ended and waited and not given_up and self._oldest() is request:
                self._answers.inc()
            self._note(request, waits=False)
            await send(message)  # takes as long as the client does
            self._note(request, waits=waited and not ended)

        try:
            await self._app(scope, reading, sending)
        finally:
            self._note(request, waits=False)
            self._asked.pop(request, None)

    def _oldest(self) -> object:
        """The request that was read first of those that wait."""
        return next((request for request, waits in self._asked.items() if waits), None)

    def _note(self, request: object, *, waits: bool) -> None:
        """Whether a request waits for the engine now; saying it again changes nothing."""
        if waits != self._asked.get(request, False):
            self._asked[request] = waits
            self._gauge.inc(1 if waits else -1)

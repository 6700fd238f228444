"""The source that is another node: nearer than the mirror, and left at the first sign that it is not worth it."""

import asyncio
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.http_source import host_of
from runtime.peer_wire import STEP, Answer, BrokenError, Exchange, Pace, PeerWire
from runtime.sink import Sink
from runtime.sources import SourceKind
from runtime.threads import abandonable

HAVE = "LLMGW-Have"
"""Header of an answer 503: bytes of the file that the peer has itself by now."""
PATH = "/weights/"
"""Before the SHA-256 of the file that is asked for."""
LISTINGS = "/listings/"
"""Before the id of the weights whose files are asked for."""
PACE = Pace(connect_s=3.0, silent_s=5.0, grace_s=5.0, rate=1024**2)
"""Of one file: a peer that gives less is no gain over the mirror."""
SPAN = 64 * 1024**2
"""Bytes of one request, a tenth of a second on ten gigabits: so peers that ask the same node take turns."""
PATIENCE_S = 10.0
"""For a peer that fetches the file itself, without a byte more of it: then the mirror is asked."""
POLL_S = 0.15
"""A request that finds nothing new costs a peer a tenth of a millisecond."""
TRIES = 2
"""A kept connection may have been closed by the peer while it was idle. An answer that breaks off within its first MiB
counts as none: with a byte of each, a fetch would go on for years."""


class PeerSource:
    """Files by their hash, from one node."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        pace: Pace = PACE,
        patience_s: float = PATIENCE_S,
        waiting: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`waiting` is entered with the peer's name while it has nothing new yet."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pace = pace
        self._patience_s = patience_s
        self._waiting = waiting
        self._wire = PeerWire(self._url, pace)
        self._news: dict[str, tuple[int, float]] = {}
        """What the peer had of a file when it said so last, and since when."""

    @property
    def kind(self) -> SourceKind:
        return "peer"

    @property
    def name(self) -> str:
        return host_of(self._url)

    async def pour(self, file: ModelFile, sink: Sink, told: Callable[[int], None]) -> None:
        if not file.sha256:
            raise StepError(Reason.WEIGHTS_MISSING, f"{file.path} has no hash to ask {self.name} for")
        broken = 0
        while sink.size < file.size:
            exchange, before = self._wire.begin(), sink.size
            try:
                answer = await self._ask(exchange, file, sink)
                if answer.status == 206:
                    await self._take(exchange, answer, sink, told)
            except BrokenError as error:
                self._wire.close()  # what idles beside it has been closed with it
                broken = broken + 1 if sink.size - before < STEP else 0
                if broken == TRIES:
                    raise StepError(Reason.NODE_UNREACHABLE, f"{self.name}: {error}") from error
                continue
            finally:
                exchange.end()
            broken = 0
            if answer.status == 206:
                self._news.pop(file.path, None)
            elif answer.status in (404, 503):
                self._wait_no_longer(file, answer)
                with self._waiting(self.name):
                    await asyncio.sleep(POLL_S)
            else:
                raise StepError(Reason.NODE_UNREACHABLE, f"{self.name} answers {answer.status} for {file.path}")

    async def close(self) -> None:
        self._wire.close()

    async def _ask(self, exchange: Exchange, file: ModelFile, sink: Sink) -> Answer:
        length = min(SPAN, file.size - sink.size)
        ask = functools.partial(exchange.ask, f"{PATH}{file.sha256}", self._headers, sink.size, length)
        try:
            # Of all of it: a peer that says a letter of its headers now and then is never silent.
            async with asyncio.timeout(self._pace.connect_s + self._pace.silent_s):
                answer = await abandonable(ask, exchange.cut)
        except TimeoutError as error:
            raise BrokenError("it does not answer") from error
        said = answer.headers.get("Content-Range", "")
        right = f"bytes {sink.size}-{sink.size + answer.length - 1}/{file.size}"
        if answer.status == 206 and (said != right or not 0 < answer.length <= length):
            raise StepError(
                Reason.NODE_UNREACHABLE, f"{self.name} answers another range of {file.path} than was asked for"
            )
        return answer

    async def _take(self, exchange: Exchange, answer: Answer, sink: Sink, told: Callable[[int], None]) -> None:
        """The answer's bytes, unless they come too slowly."""
        began = time.monotonic()

        def judge() -> None:
            seconds = time.monotonic() - began
            if seconds > self._pace.grace_s and exchange.got < min(self._pace.rate * seconds, answer.length):
                raise StepError(
                    Reason.NODE_UNREACHABLE, f"{self.name} is too slow: {exchange.got / seconds / 1024:.0f} KiB/s"
                )

        await sink.draw(exchange.take, answer.length, told, judge=judge, cut=exchange.cut)
        if exchange.got < answer.length:
            raise BrokenError("the connection ended early")

    def _wait_no_longer(self, file: ModelFile, answer: Answer) -> None:
        """Raise where the peer has had nothing new for too long."""
        told = answer.headers.get(HAVE, "")
        have, now = int(told) if told.isdecimal() and len(told) <= 18 else -1, time.monotonic()
        before, since = self._news.setdefault(file.path, (have, now))
        if have > before:
            self._news[file.path] = have, now
        elif now - since > self._patience_s:
            raise StepError(Reason.WEIGHTS_MISSING, f"{self.name} does not get {file.path}")

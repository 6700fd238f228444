"""The source that is another node: nearer than the mirror, and left at the first sign that it is not worth it."""

import asyncio
import functools
import time

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.http_source import host_of
from runtime.peer_wire import Answer, BrokenError, Exchange, Pace, PeerWire
from runtime.sources import SourceKind
from runtime.threads import abandonable

HAVE = "LLMGW-Have"
"""Header of an answer 503: bytes of the file that the peer has itself by now."""
PATH = "/weights/"
"""Before the SHA-256 of the file that is asked for."""
PACE = Pace(connect_s=3.0, silent_s=5.0, grace_s=5.0, rate=256 * 1024)
"""Of one of four connections: a peer that gives less than 1 MiB/s in all is no gain over the mirror."""
PATIENCE_S = 10.0
"""For a peer that fetches the file itself, without a byte more of it: then the mirror is asked."""
POLL_S = 0.15
"""A request that finds nothing new costs a peer a tenth of a millisecond."""
TRIES = 2
"""A kept connection may have been closed by the peer while it was idle."""


class PeerSource:
    """Files by their hash, from one node."""

    def __init__(self, url: str, token: str, *, pace: Pace = PACE, patience_s: float = PATIENCE_S) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pace = pace
        self._patience_s = patience_s
        self._wire = PeerWire(self._url, pace)
        self._news: dict[str, tuple[int, float]] = {}
        """What the peer had of a file when it said so last, and since when."""

    @property
    def kind(self) -> SourceKind:
        return "peer"

    @property
    def name(self) -> str:
        return host_of(self._url)

    async def read(self, file: ModelFile, offset: int, view: memoryview) -> int:
        if not file.sha256:
            raise StepError(Reason.WEIGHTS_MISSING, f"{file.path} has no hash to ask {self.name} for")
        while True:
            answer = await self._ask(file, offset, view)
            if answer.status == 206:
                self._news.pop(file.path, None)
                return answer.got
            if answer.status not in (404, 503):
                raise StepError(Reason.NODE_UNREACHABLE, f"{self.name} answers {answer.status} for {file.path}")
            self._wait_no_longer(file, answer)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self._wire.close()

    async def _ask(self, file: ModelFile, offset: int, view: memoryview) -> Answer:
        trouble = ""
        for _ in range(TRIES):
            exchange = self._wire.begin()
            get = functools.partial(exchange.get, f"{PATH}{file.sha256}", self._headers, offset, view)
            try:
                return await self._watched(asyncio.ensure_future(abandonable(get, exchange.cut)), exchange)
            except BrokenError as error:
                trouble = str(error)
        raise StepError(Reason.NODE_UNREACHABLE, f"{self.name}: {trouble}")

    async def _watched(self, asking: "asyncio.Future[Answer]", exchange: Exchange) -> Answer:
        """The answer, unless its bytes come too slowly."""
        began, wait = time.monotonic(), self._pace.grace_s
        try:
            while True:
                await asyncio.wait([asking], timeout=wait)
                if asking.done():
                    return asking.result()
                seconds = time.monotonic() - began
                if exchange.got < self._pace.rate * seconds:
                    raise StepError(
                        Reason.NODE_UNREACHABLE,
                        f"{self.name} is too slow: {exchange.got / seconds / 1024:.0f} KiB/s on a connection",
                    )
                wait = 1.0
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    def _wait_no_longer(self, file: ModelFile, answer: Answer) -> None:
        """Raise where the peer has had nothing new for too long."""
        told = answer.headers.get(HAVE, "")
        have, now = int(told) if told.isdigit() else -1, time.monotonic()
        before, since = self._news.setdefault(file.path, (have, now))
        if have > before:
            self._news[file.path] = have, now
        elif now - since > self._patience_s:
            raise StepError(Reason.WEIGHTS_MISSING, f"{self.name} does not get {file.path}")

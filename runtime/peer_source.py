"""The source that is another node: nearer than the mirror, and left at the first sign that it is not worth it."""

import asyncio
import functools
import time

import requests

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.http_source import host_of
from runtime.ranges import Answer, BrokenError, Exchange, Pace, SlowError, new_session
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
        # A peer is inside the fleet's network: no proxy knows the way, and no .netrc its secret.
        self._session = new_session(proxies=False)
        self._session.max_redirects = 0
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
            if answer.status == 206 and answer.start == offset and answer.total == file.size:
                self._news.pop(file.path, None)
                return answer.got
            if answer.status not in (404, 503):
                raise StepError(Reason.NODE_UNREACHABLE, f"{self.name} answers {answer.status} for {file.path}")
            self._wait_no_longer(file, answer)
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self._session.close()

    async def _ask(self, file: ModelFile, offset: int, view: memoryview) -> Answer:
        url = f"{self._url}{PATH}{file.sha256}"
        for _ in range(TRIES):
            exchange = Exchange(self._session, self._pace)
            get = functools.partial(exchange.get, url, self._headers, offset, view)
            try:
                return await abandonable(get, exchange.cut)
            except BrokenError as error:
                broken = error
            except SlowError as error:
                raise StepError(Reason.NODE_UNREACHABLE, f"{self.name} is too slow: {error}") from error
            except requests.RequestException as error:
                raise StepError(Reason.NODE_UNREACHABLE, f"{self.name}: {type(error).__name__}") from error
        raise StepError(Reason.NODE_UNREACHABLE, f"{self.name}: {broken}") from broken

    def _wait_no_longer(self, file: ModelFile, answer: Answer) -> None:
        """Raise where the peer has had nothing new for too long."""
        told = answer.headers.get(HAVE, "")
        have, now = int(told) if told.isdigit() else -1, time.monotonic()
        before, since = self._news.setdefault(file.path, (have, now))
        if have > before:
            self._news[file.path] = have, now
        elif now - since > self._patience_s:
            raise StepError(Reason.WEIGHTS_MISSING, f"{self.name} does not get {file.path}")

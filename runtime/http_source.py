"""The source that is a hub or a mirror behind HTTP, with a patience for what may pass."""

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import requests

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.ranges import Answer, BrokenError, Exchange, Pace, new_session
from runtime.sources import SourceKind
from runtime.threads import abandonable

TRIES = 5
"""Requests in a row that bring no byte: with the waits below, four seconds, then Temporal's retry takes over."""
FIRST_WAIT_S = 0.25
MAX_WAIT_S = 30.0
"""What a hub's Retry-After may cost at most within one attempt."""


class HttpSource:
    """Files by their URLs."""

    def __init__(
        self,
        kind: SourceKind,
        name: str,
        locate: Callable[[ModelFile], str],
        *,
        headers: Mapping[str, str] | None = None,
        unreachable: Reason = Reason.HUB_UNREACHABLE,
    ) -> None:
        """`headers` go to the host of the file's URL; of those, a redirect to another host drops Authorization."""
        self._kind: SourceKind = kind
        self._name = name
        self._locate = locate
        self._headers = dict(headers or {})
        self._unreachable = unreachable
        self._session = new_session()
        self._moved: dict[str, str] = {}
        """Where a redirect led, so that the next range asks there at once; such a URL may be a secret."""
        self._serial: dict[str, asyncio.Lock] = {}
        """Files whose server knows no ranges: one body is read from its beginning to its end."""
        self._bodies: dict[str, tuple[int, Exchange]] = {}
        """Such a body with the place of its next byte."""

    @property
    def kind(self) -> SourceKind:
        return self._kind

    @property
    def name(self) -> str:
        return self._name

    async def read(self, file: ModelFile, offset: int, view: memoryview) -> int:
        serial = self._serial.get(file.path)
        if serial is None:
            return await self._patiently(file, offset, view)
        async with serial:
            place, body = self._bodies.pop(file.path, (-1, None))
            if body is None or place != offset:
                if body is not None:
                    body.close()
                return await self._patiently(file, offset, view)
            try:
                got = await abandonable(lambda: body.more(view), body.cut)
            except BrokenError:
                return await self._patiently(file, offset, view)
            self._keep(file, offset + got, body)
            return got

    async def close(self) -> None:
        for _, body in self._bodies.values():
            body.close()
        self._session.close()

    def _keep(self, file: ModelFile, place: int, body: Exchange) -> None:
        """Go on with this body at the next read, where there is more of it."""
        if body.unfinished:
            _, other = self._bodies.get(file.path, (0, None))
            if other is not None:
                other.close()
            self._bodies[file.path] = (place, body)

    async def _patiently(self, file: ModelFile, offset: int, view: memoryview) -> int:
        idle = 0
        while True:
            try:
                return await self._once(file, offset, view)
            except _AgainError as again:
                idle += 1
                if idle == TRIES:
                    host = host_of(self._locate(file))
                    raise StepError(
                        self._unreachable,
                        f"{host} gave {offset} of {file.size} bytes of {file.path}, then: {again}",
                    ) from again
                await asyncio.sleep(min(MAX_WAIT_S, max(again.wait_s, FIRST_WAIT_S * 2.0 ** (idle - 1))))

    async def _once(self, file: ModelFile, offset: int, view: memoryview) -> int:
        home = self._locate(file)
        moved = self._moved.get(file.path)
        exchange = Exchange(self._session, Pace())
        headers = self._headers if moved is None or host_of(moved) == host_of(home) else {}
        try:
            answer = await abandonable(lambda: exchange.get(moved or home, headers, offset, view), exchange.cut)
        except BrokenError as error:
            self._moved.pop(file.path, None)
            raise _AgainError(str(error)) from error
        except requests.RequestException as error:
            raise StepError(self._unreachable, f"{host_of(home)}, asked for {file.path}: {error}") from error
        if moved is not None and answer.status not in (200, 206):
            del self._moved[file.path]  # a signed URL ends some day: ask at home for a new one
            raise _AgainError(f"status {answer.status}", wait_s=0.0)
        try:
            self._judge(answer, home, file, offset)
        except StepError:
            exchange.close()
            raise
        if answer.url != home:
            self._moved[file.path] = answer.url
        if exchange.unfinished:
            self._serial.setdefault(file.path, asyncio.Lock())
            self._keep(file, offset + answer.got, exchange)
        return answer.got

    def _judge(self, answer: Answer, home: str, file: ModelFile, offset: int) -> None:
        status, host = answer.status, host_of(home)
        if answer.total is not None and answer.total != file.size and status in (200, 206, 416):
            raise StepError(
                Reason.WEIGHTS_CORRUPT, f"{host} has {answer.total} bytes for {file.path}, {file.size} are expected"
            )
        if status in (200, 206):
            if answer.start > offset:
                raise _AgainError(f"the answer starts at {answer.start}, not at {offset}")
            return
        if status in (401, 403):
            raise StepError(Reason.REPO_FORBIDDEN, f"{host} answers {status} for {file.path}")
        if status in (404, 410):
            raise StepError(Reason.WEIGHTS_MISSING, f"{host} has no {file.path} (status {status})")
        if status in (408, 429) or status >= 500:
            asked = answer.headers.get("Retry-After", "")
            raise _AgainError(f"status {status}", wait_s=float(asked) if asked.isdecimal() else 0.0)
        raise StepError(self._unreachable, f"{host} answers {status} for {file.path}")


def host_of(url: str) -> str:
    """Where, without path and query: a signed URL is a secret."""
    return urlsplit(url).netloc.rpartition("@")[2]


class _AgainError(Exception):
    """The request is worth another try; the text says what happened."""

    def __init__(self, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s

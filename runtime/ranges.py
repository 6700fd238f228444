"""One HTTP request for a range of a file: asked, judged and drained in a thread that can be cut off."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse

STEP = 1024**2
"""Bytes of one read from the socket at most."""
CONNECTIONS_KEPT = 16
"""Of one session, between requests."""


class BrokenError(Exception):
    """The request brought nothing and another may; the text says what happened."""


@dataclass(frozen=True)
class Pace:
    """The least that is taken for an answer."""

    connect_s: float = 10.0
    silent_s: float = 30.0
    """A healthy server streams without such gaps."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    url: str
    """Where the bytes came from in the end."""
    got: int = 0
    """Bytes that are in the view now."""
    start: int = 0
    """Their place in the file: 0 where the server knows no ranges."""
    total: int | None = None
    """Bytes of the whole file, where the server says so."""


class Exchange:
    """One request, which another thread may cut off."""

    def __init__(self, session: requests.Session, pace: Pace) -> None:
        self._session = session
        self._pace = pace
        self._raw: HTTPResponse | None = None
        self._cut = False

    def cut(self) -> None:
        """End it, also while a thread waits for its bytes."""
        self._cut = True
        raw = self._raw
        if raw is not None:
            with suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
                raw.shutdown()

    def get(self, url: str, headers: Mapping[str, str], offset: int, view: memoryview) -> Answer:
        """Ask for the range that fills `view`. Raises BrokenError, requests.RequestException."""
        sent = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + len(view) - 1}", **headers}
        try:
            response = self._session.get(
                url, headers=sent, stream=True, timeout=(self._pace.connect_s, self._pace.silent_s)
            )
        except (requests.ConnectionError, requests.Timeout) as error:
            raise BrokenError(_said(error)) from error
        raw: HTTPResponse = response.raw
        self._raw = raw
        if self._cut:
            raw.close()
            raise BrokenError("it was cut off")
        start, total = _place(response)
        answer = Answer(response.status_code, response.headers, response.url, 0, start, total)
        if response.status_code not in (200, 206) or start > offset:
            raw.close()
            return answer
        got = self._drain(raw, offset - start, view)
        return Answer(response.status_code, response.headers, response.url, got, start, total)

    @property
    def unfinished(self) -> bool:
        """Whether the body goes on behind what was asked for, as that of a server without ranges does."""
        return self._raw is not None and not self._raw.closed and bool(self._raw.length_remaining)

    def more(self, view: memoryview) -> int:
        """Go on with an unfinished body. Raises BrokenError."""
        if self._raw is None:
            raise BrokenError("nothing was asked for")
        return self._drain(self._raw, 0, view)

    def close(self) -> None:
        """Leave an unfinished body, and its connection with it."""
        if self._raw is not None:
            self._raw.close()

    def _drain(self, raw: HTTPResponse, skip: int, view: memoryview) -> int:
        """Fill the view from a body, `skip` bytes of it left out."""
        got = 0
        try:
            while got < len(view):
                piece = raw.read1(min(STEP, skip or len(view) - got))
                if not piece:
                    break
                if skip:
                    skip -= len(piece)
                    continue
                view[got : got + len(piece)] = piece
                got += len(piece)
        except (HTTPError, OSError) as error:
            if not got:
                raise BrokenError(_said(error)) from error
        finally:
            if got < len(view):
                raw.close()
            elif not raw.length_remaining:
                raw.drain_conn()  # nothing is left: the connection goes back for the next range
        if not got:
            raise BrokenError("the connection ended early")
        return got


def new_session() -> requests.Session:
    """Connections that are kept between ranges, by the proxies that the environment names."""
    session = requests.Session()
    adapter = HTTPAdapter(pool_connections=4, pool_maxsize=CONNECTIONS_KEPT)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


def _place(response: requests.Response) -> tuple[int, int | None]:
    """First byte and whole length, as the answer tells them."""
    span = response.headers.get("Content-Range", "").removeprefix("bytes ")
    if response.status_code in (206, 416):
        place, _, total = span.partition("/")
        first = place.partition("-")[0]
        return _bytes(first) or 0, _bytes(total)
    return 0, _bytes(response.headers.get("Content-Length", "")) if response.status_code == 200 else None


def _bytes(text: str) -> int | None:
    """A count of bytes; None for what is none, such as a superscript digit or a thousand of them."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def _said(error: Exception) -> str:
    """The innermost cause: what requests wraps around it names addresses of objects."""
    inner: BaseException = error
    while inner.args and isinstance(inner.args[-1], BaseException):
        inner = inner.args[-1]
    reason = getattr(inner, "reason", None)
    return str(reason or getattr(inner, "strerror", None) or inner or type(inner).__name__)

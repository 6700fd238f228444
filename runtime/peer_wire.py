"""Requests for ranges to one node, on connections that are kept: received where the bytes belong, without a copy."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

STEP = 1024**2
"""Bytes of one read at most; after each the count moves on."""


class BrokenError(Exception):
    """The request brought nothing."""


@dataclass(frozen=True)
class Pace:
    """The least that is taken for an answer."""

    connect_s: float
    silent_s: float
    grace_s: float
    rate: float
    """Bytes a second of one request, once the grace is over."""


@dataclass(frozen=True)
class Answer:
    """What came back, before its bytes."""

    status: int
    headers: Mapping[str, str]
    length: int = 0
    """Bytes that follow."""


class PeerWire:
    """The connections to one node; used by several threads."""

    def __init__(self, url: str, pace: Pace) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._pace = pace
        self._guard = threading.Lock()
        self._idle: list[HTTPConnection] = []

    def begin(self) -> "Exchange":
        """One request on a connection that is free, or on a new one."""
        with self._guard:
            kept = self._idle.pop() if self._idle else None
        if kept is None:
            kept = HTTPConnection(self._host, self._port, timeout=self._pace.connect_s)
        return Exchange(self, kept, self._pace.silent_s)

    def keep(self, connection: HTTPConnection) -> None:
        """It is free again."""
        with self._guard:
            self._idle.append(connection)

    def close(self) -> None:
        """Close what is free."""
        with self._guard:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


class Exchange:
    """One request, which another thread may cut off."""

    def __init__(self, wire: PeerWire, connection: HTTPConnection, silent_s: float) -> None:
        self._wire = wire
        self._connection = connection
        self._silent_s = silent_s
        self._response: HTTPResponse | None = None
        self._cut = False
        self.got = 0
        """Bytes so far."""

    def cut(self) -> None:
        """End it, also while a thread waits for its bytes."""
        self._cut = True
        opened = self._connection.sock
        if opened is not None:
            with suppress(OSError):  # it has ended by itself
                opened.shutdown(socket.SHUT_RDWR)

    def ask(self, path: str, headers: Mapping[str, str], offset: int, length: int) -> Answer:
        """Ask for a range; `take` gives its bytes where the status is 206. Raises BrokenError."""
        connection = self._connection
        try:
            if connection.sock is None:
                _connect(connection, self._silent_s)
            connection.request("GET", path, headers={**headers, "Range": f"bytes={offset}-{offset + length - 1}"})
            response = connection.getresponse()
            if response.status != 206:
                response.read()
            if self._cut:  # nobody waits for it, and nobody else will close it
                raise BrokenError("it was cut off")
        except BrokenError:
            connection.close()
            raise
        except (HTTPException, OSError) as error:
            connection.close()
            raise BrokenError(_said(error)) from error
        self._response = response
        return Answer(response.status, dict(response.headers), response.length or 0)

    def take(self, view: memoryview) -> int:
        """The next bytes, until the view is full or they end, also too early. Raises BrokenError before the first."""
        if self._response is None:
            raise BrokenError("nothing was asked for")
        filled = 0
        try:
            while filled < len(view):
                got = self._response.readinto(view[filled : filled + STEP])
                if not got:
                    break
                filled += got
                self.got += got
        except (HTTPException, OSError) as error:
            if not self.got:
                raise BrokenError(_said(error)) from error
            self._response.close()  # what came is taken, and the next request tells how the peer is
        return filled

    def end(self) -> None:
        """Keep the connection where its answer was read to the end; otherwise close it."""
        response = self._response
        if response is not None and response.isclosed() and not response.will_close and self._connection.sock:
            self._wire.keep(self._connection)
        else:
            self._connection.close()


def _connect(connection: HTTPConnection, silent_s: float) -> None:
    connection.connect()
    connection.sock.settimeout(silent_s)


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

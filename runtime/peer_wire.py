"""Requests for ranges to one node, on connections that are kept: received where the bytes belong, without a copy."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

STEP = 1024**2
"""Bytes of one read at most; after each the count moves on."""
SMALL = 64 * 1024
"""Bytes of a refusal that are read, so that its connection can be used again."""


class BrokenError(Exception):
    """The request brought nothing, or not what it said."""


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
    headers: Message
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
        self._guard = threading.Lock()
        self._socket: socket.socket | None = None
        """Known here too: `http.client` forgets it where the answer says `Connection: close`."""
        self._response: HTTPResponse | None = None
        self._cut = False
        self._whole = False
        """Whether nothing of the answer is left on the connection."""
        self.got = 0
        """Bytes so far."""

    def cut(self) -> None:
        """End it, also while a thread waits for its bytes."""
        with self._guard:
            self._cut = True
            opened = self._socket
        if opened is not None:
            with suppress(OSError):  # it has ended by itself
                opened.shutdown(socket.SHUT_RDWR)

    def ask(self, path: str, headers: Mapping[str, str], offset: int, length: int) -> Answer:
        """Ask for a range; `take` gives its bytes where the status is 206. Raises BrokenError."""
        connection, response = self._connection, None
        try:
            self._connect()
            connection.request("GET", path, headers={**headers, "Range": f"bytes={offset}-{offset + length - 1}"})
            response = connection.getresponse()
            if response.status != 206 and response.length is not None and response.length <= SMALL:
                response.read()
                self._whole = True
            following = response.length or 0
            with self._guard:
                if self._cut:
                    raise BrokenError("it was cut off")
                self._response = response
        except (BrokenError, HTTPException, OSError) as error:
            # Here: who waited for it may have gone.
            connection.close()
            if response is not None:
                response.close()
            if isinstance(error, BrokenError):
                raise
            raise BrokenError(_said(error)) from error
        return Answer(response.status, response.headers, following)

    def take(self, view: memoryview) -> int:
        """The next bytes, until the view is full or they end, also too early. Raises BrokenError before the first."""
        if self._response is None:
            raise BrokenError("nothing was asked for")
        filled = 0
        try:
            while filled < len(view) and not self._cut:
                got = self._response.readinto(view[filled : filled + STEP])
                if not got:
                    break
                filled += got
                self.got += got
        except (HTTPException, OSError) as error:
            if not self.got:
                raise BrokenError(_said(error)) from error
            self._response.close()  # what came is taken, and the next request tells how the peer is
        self._whole = self._response.length == 0
        return filled

    def end(self) -> None:
        """Keep the connection where its answer was read to the end; otherwise close it."""
        with self._guard:
            response = self._response
        if response is None:
            return  # the thread that asks closes it, now or when it is done
        if self._whole and not response.will_close:
            self._wire.keep(self._connection)
        else:
            self._connection.close()
            response.close()

    def _connect(self) -> None:
        connection = self._connection
        fresh = connection.sock is None
        if fresh:
            connection.connect()
            connection.sock.settimeout(self._silent_s)
        with self._guard:
            self._socket = connection.sock
            if self._cut:
                raise BrokenError("it was cut off")


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

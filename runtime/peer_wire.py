"""Requests for ranges to one node, on connections that are kept: received where the bytes belong, without a copy."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urlsplit

STEP = 256 * 1024
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
    """What came back."""

    status: int
    headers: Mapping[str, str]
    got: int = 0
    """Bytes that are in the view now."""


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
        self.got = 0
        """Bytes so far."""

    def cut(self) -> None:
        """End it, also while a thread waits for its bytes."""
        opened = self._connection.sock
        if opened is not None:
            with suppress(OSError):  # it has ended by itself
                opened.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, headers: Mapping[str, str], offset: int, view: memoryview) -> Answer:
        """Ask for the range that fills `view`, and take what comes of it. Raises BrokenError."""
        connection = self._connection
        whole = False
        try:
            if connection.sock is None:
                _connect(connection, self._silent_s)
            sent = {**headers, "Range": f"bytes={offset}-{offset + len(view) - 1}"}
            connection.request("GET", path, headers=sent)
            response = connection.getresponse()
            if response.status == 206:
                self._receive(response, view)
            else:
                response.read()
            whole = response.isclosed() and not response.will_close
            return Answer(response.status, dict(response.headers), self.got)
        except (HTTPException, OSError) as error:
            if self.got:
                return Answer(206, {}, self.got)
            raise BrokenError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        finally:
            if whole:
                self._wire.keep(connection)
            else:
                connection.close()

    def _receive(self, response: HTTPResponse, view: memoryview) -> None:
        while self.got < len(view):
            got = response.readinto(view[self.got : self.got + STEP])
            if not got:
                break
            self.got += got
        if not self.got:
            raise BrokenError("the connection ended early")


def _connect(connection: HTTPConnection, silent_s: float) -> None:
    connection.connect()
    connection.sock.settimeout(silent_s)

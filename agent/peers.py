"""The node's door for other nodes: verified files, and those that grow, by HTTP with ranges and a shared secret."""

import hmac
import logging
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent.offers import Offer, Offers
from runtime.peer_source import HAVE, LISTINGS, PATH

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Answers with bytes: two nodes with two files on four connections each. Who comes beyond that is told to wait."""
CONNECTIONS = 256
"""Open ones; each costs a thread that mostly sleeps."""
IDLE_S = 30.0
"""A connection that asks nothing, or takes nothing, for so long is closed."""
_ASKED = re.compile(re.escape(PATH) + r"([0-9a-f]{64})")
_LISTED = re.compile(re.escape(LISTINGS) + r"([a-z0-9-]{1,200})")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")


class PeerServer:
    """Listens from `open` to `close`, in threads of its own: the kernel copies, the event loop is not touched."""

    def __init__(self, offers: Offers, secret: str) -> None:
        self._offers = offers
        self._secret = secret
        self._server: _Server | None = None
        self.url = ""
        """Where other nodes ask; empty while it does not listen."""

    def open(self, address: str, port: int) -> None:
        """Listen. Where that cannot be, the node goes on without: others then have the files from elsewhere."""
        try:
            self._server = _Server(address, port, self._offers, self._secret)
        except OSError as error:
            logger.error("weights are not served to other nodes: %s:%d: %s", address, port, error.strerror or error)
            return
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="peers", daemon=True
        ).start()
        logger.info("weights are served to other nodes at %s", self.url)

    def close(self) -> None:
        """Listen no longer; answers under way break off."""
        self.url = ""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, port: int, offers: Offers, secret: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.offers = offers
        self.expected = f"Bearer {secret}".encode()
        self.answers = threading.BoundedSemaphore(AT_ONCE)
        self._connections = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away in the middle is no error of ours."""
        logger.debug("a peer's connection broke off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "llmgw"
    sys_version = ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self.server.expected):
            return self._refuse(401)
        asked = _ASKED.fullmatch(self.path)
        span = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
        listed = _LISTED.fullmatch(self.path)
        if listed is not None:
            return self._list(listed[1])
        if asked is None:
            return self._refuse(404)
        if span is None:
            return self._refuse(416)
        offer = self.server.offers.find(asked[1])
        if offer is None:
            return self._refuse(404)
        start = int(span[1])
        end = min(int(span[2]) if span[2] else offer.size - 1, offer.have - 1)
        if start >= offer.size:
            return self._refuse(416)
        if start > end:
            return self._refuse(503, **{HAVE: str(offer.have)})
        if not self.server.answers.acquire(blocking=False):
            return self._refuse(503)
        try:
            self._give(offer, start, end)
        finally:
            self.server.answers.release()
        return None

    def _list(self, name: str) -> None:
        text = self.server.offers.listing(name).encode()
        if not text:
            return self._refuse(404)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        return None

    def _give(self, offer: Offer, start: int, end: int) -> None:
        try:
            stream = offer.path.open("rb")
        except OSError:
            self._refuse(503)  # it is being moved to its place, or removed
            return
        with stream:
            self.send_response(206)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Range", f"bytes {start}-{end}/{offer.size}")
            self.send_header("Content-Length", str(end - start + 1))
            self.end_headers()
            sent = self.connection.sendfile(stream, start, end - start + 1)
            if sent != end - start + 1:
                self.close_connection = True

    def _refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Each range would be a line."""

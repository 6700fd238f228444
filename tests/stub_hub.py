"""A hub on 127.0.0.1 that speaks the endpoints the real client uses, and can fail in every way a real one does."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What goes wrong with the next `times` requests for `where`."""

    where: Literal["api", "resolve"]
    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int = -1
    """Bytes of the body after which the connection is closed."""
    flip: bool = False
    """Change the first byte of the body."""
    hold: threading.Event | None = None
    """Wait for it in the middle of the body."""
    path: str = ""
    """Only of requests whose path ends so."""
    since: int = 0
    """Only of ranges that begin here or later."""


@dataclass
class Hub:
    """The stub: its files, its faults, and what it was asked."""

    files: dict[str, bytes]
    repo: str = "org/name"
    token: str = ""
    """Asked for where it is not empty."""
    ranges: bool = True
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""
    bodies: list[int] = field(default_factory=list)
    """Bytes of each body of a file that it was asked for."""

    @property
    def given(self) -> int:
        """Bytes of files in all."""
        return sum(self.bodies)

    def take(self, where: str, path: str, start: int) -> Fault:
        """The fault of this request."""
        for fault in self.faults:
            if fault.where == where and fault.times > 0 and path.endswith(fault.path) and start >= fault.since:
                fault.times -= 1
                return fault
        return Fault("api", 0)

    def asked(self, part: str) -> list[dict[str, str]]:
        """The headers of each GET whose path holds `part`, in order."""
        return [headers for method, path, headers in self.requests if method == "GET" and part in path]


@contextmanager
def stub_hub(files: Mapping[str, bytes], **more: Any) -> Iterator[Hub]:
    """Serve `files` as the repo org/name."""
    hub = Hub(dict(files), **more)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.served
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, {key.lower(): value for key, value in self.headers.items()}))
        first = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        fault = hub.take("api" if path.startswith("/api/") else "resolve", path, int(first))
        if fault.status:
            self._send(fault.status, b'{"error":"secret-in-the-body"}', fault.headers)
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/"):
            self._info(path.removeprefix("/api/models/"), fault)
        else:
            self._file(path, fault)

    def _info(self, name: str, fault: Fault) -> None:
        hub = self.served
        repo, _, revision = name.partition("/revision/")
        if repo != hub.repo:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("", "main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [_sibling(path, data) for path, data in hub.files.items()]
            body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, fault)

    def _file(self, path: str, fault: Fault) -> None:
        hub = self.served
        name = path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/").removeprefix("/")
        if name not in hub.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = hub.files[name]
        start, end = 0, len(data)
        status, headers = 200, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        asked = self.headers.get("Range", "")
        if hub.ranges and asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1) if last else end
            if start >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        body = data[start:end]
        hub.bodies.append(len(body))
        if fault.flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        self._send(status, body, headers, fault)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.hold is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            fault.hold.wait(30)
            body = body[len(body) // 2 :]
        if fault is not None and fault.cut_after >= 0:
            self.wfile.write(body[: fault.cut_after])
            self.close_connection = True
            return
        try:
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the client went away, as it may

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: pytest shows `Hub.requests` where a test fails."""


def _sibling(path: str, data: bytes) -> dict[str, object]:
    """As the hub lists it: the SHA-256 of what is in LFS, nothing but a size of the rest."""
    entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": hashlib.sha256(data).hexdigest()[:40]}
    if path.endswith((".gguf", ".safetensors", ".bin")):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry

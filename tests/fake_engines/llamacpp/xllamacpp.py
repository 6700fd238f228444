"""Stands in for llama.cpp's package beneath the real launcher: quick to start, and it fails as it is told to.

`stand_in=<how>` as an engine argument: `oom` prints that the GPU's memory is out and exits with 1, `killed` ends by
SIGKILL while it loads, `loading` never becomes ready, `mute` answers with an empty text.
"""

import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

OUT_OF_MEMORY = "CUDA out of memory"


class CommonParams:
    """The settings that the launcher sets, and the one that tells how to fail."""

    def __init__(self) -> None:
        self.stand_in = ""
        self.fit_params = True
        self.cache_ram_mib = 8192
        self.n_gpu_layers = 0
        self.tensor_split = [0.0] * 128
        self.model = SimpleNamespace(path="")
        self.hostnames: list[str] = []
        self.port = 0
        self.model_alias: set[str] = set()
        self.n_ctx = 0
        self.n_parallel = 1
        self.endpoint_metrics = False
        self.api_keys: list[str] = []


class Server:
    """Serves from the moment it is made."""

    def __init__(self, params: CommonParams) -> None:
        if params.stand_in == "oom":
            sys.stderr.write(f"{OUT_OF_MEMORY}\n")
            sys.exit(1)
        if params.stand_in == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.listening_address = f"http://{params.hostnames[0]}:{params.port}"
        server = _Http((params.hostnames[0], params.port), _Handler)
        server.how = params.stand_in
        threading.Thread(target=server.serve_forever, daemon=True).start()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    how = ""


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(503 if self.server.how == "loading" else 200, "text/plain", b"")
        elif self.path == "/metrics":
            self._answer(200, "text/plain", b"llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n")
        else:
            self._answer(404, "text/plain", b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        words = [] if self.server.how == "mute" else ["Pa", "ris."]
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
        chunks.append({"choices": [], "usage": {"completion_tokens": len(words)}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._answer(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

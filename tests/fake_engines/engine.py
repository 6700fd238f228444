"""A stand-in for an engine: `/health`, `/metrics`, `/v1/chat/completions`, and knobs for everything that goes wrong.

Run as `python engine.py HOST PORT [knob=value …]`:

    slow=S        serves after S seconds; until then it listens and answers 503
    line=TEXT     prints TEXT
    exit=N        ends with code N right after that
    deaf=1        ignores SIGTERM
    loner=PATH    starts a process in a session of its own that ignores SIGTERM, and writes its pid to PATH
    busy=N        requests in flight; POST /busy/N changes it
    sick=1        health answers 500 from the start; POST /sick/1 changes it
    tokens=N      read and written in all; POST /tokens/N changes it
    metrics=HOW   full, hang (never answered), bare (without what it works on) or broken (500); POST /metrics/HOW
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LONER = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    os._exit(0)
with open(sys.argv[1] + '.new', 'w') as stream:
    stream.write(str(os.getpid()))
os.rename(sys.argv[1] + '.new', sys.argv[1])
signal.pause()
"""


class State:
    def __init__(self, knobs: dict[str, str]) -> None:
        self.ready_at = time.monotonic() + float(knobs.get("slow", 0))
        self.busy = int(knobs.get("busy", 0))
        self.sick = knobs.get("sick") == "1"
        self.tokens = int(knobs.get("tokens", 0))
        self.metrics = knobs.get("metrics", "full")
        self.looks = 0
        """At the metrics."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    state: State


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        state = self.server.state
        if time.monotonic() < state.ready_at:
            self._answer(503, "loading")
        elif self.path == "/health":
            self._answer(500 if state.sick else 200, "sick" if state.sick else "ok")
        elif self.path == "/metrics":
            self._metrics(state)
        elif self.path == "/looks":
            self._answer(200, str(state.looks))
        else:
            self._answer(404, "no such path")

    def do_POST(self) -> None:
        state = self.server.state
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, knob, *value = self.path.split("/")
        if knob == "busy":
            state.busy = int(value[0])
        elif knob == "sick":
            state.sick = value[0] == "1"
        elif knob == "tokens":
            state.tokens = int(value[0])
        elif knob == "metrics":
            state.metrics = value[0]
        message = {"role": "assistant", "content": "hello"}
        self._answer(200, json.dumps({"choices": [{"index": 0, "message": message}]}))

    def _metrics(self, state: State) -> None:
        state.looks += 1
        if state.metrics == "hang":
            self.rfile.read(1)  # until the other side gives up
        elif state.metrics == "bare":
            self._answer(200, "# TYPE fake_other gauge\nfake_other 1\n")
        elif state.metrics == "broken":
            self._answer(500, "no metrics")
        else:
            self._answer(
                200, f"# TYPE fake_running gauge\nfake_running {state.busy}\nfake_tokens_total {state.tokens}\n"
            )

    def _answer(self, code: int, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    knobs = dict(argument.partition("=")[::2] for argument in sys.argv[3:])
    if "line" in knobs:
        sys.stderr.write(knobs["line"] + "\n")
    if knobs.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "loner" in knobs:
        subprocess.Popen([sys.executable, "-c", LONER, knobs["loner"]], start_new_session=True).wait()
        while not Path(knobs["loner"]).exists():
            time.sleep(0.01)
    if "exit" in knobs:
        os._exit(int(knobs["exit"]))
    server = Server((host, port), Handler)
    server.state = State(knobs)
    server.serve_forever()


if __name__ == "__main__":
    main()

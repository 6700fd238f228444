"""`python -m sglang.launch_server` as SGLang documents it: its flags, its endpoints, its metrics, its last words.

The standard library alone. It looks at the checkpoint and fails where SGLang would, with SGLang's lines; what needs a
GPU fails on demand: `--max-total-tokens` over a billion and `--cuda-graph-max-bs` over a thousand do not fit into it.
`POST /freeze/1` lets its scheduler hang, which its health does not notice; `/freeze/0` lets it go on.
"""

import argparse
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KNOWN = ("LlamaForCausalLM", "Qwen2ForCausalLM")
TOKEN_S = 0.02


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch_server.py")
    parser.add_argument("--model-path", "--model", required=True, type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--max-running-requests", type=int, default=2)
    parser.add_argument("--max-total-tokens", type=int, default=0)
    parser.add_argument("--cuda-graph-max-bs", type=int, default=0)
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "--pp-size", type=int, default=1)
    parser.add_argument("--dist-init-addr", "--nccl-init-addr")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-timeout", type=int, default=600)
    parser.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"], default="auto")
    parser.add_argument("--device")
    parser.add_argument("--api-key")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--enable-metrics", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    say(f"server_args=ServerArgs(model_path='{given.model_path}', port={given.port}, device='{given.device}')")
    load(given)
    meet(given)
    scheduler = Scheduler(given.max_running_requests)
    say("The server is fired up and ready to roll!")
    try:
        server = Server((given.host, given.port), Handler)
    except OSError as error:
        where = f"('{given.host}', {given.port})"
        say(
            f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {where}: address already in use"
        )
        sys.exit(1)
    server.given, server.scheduler = given, scheduler
    server.serve_forever()


def load(given: argparse.Namespace) -> None:
    """What its scheduler process does first; where that fails, the server kills itself."""
    path: Path = given.model_path
    try:
        config = json.loads((path / "config.json").read_text())
    except OSError:
        say(f"OSError: {path} does not appear to have a file named config.json. Checkout the hub for available files.")
        sys.exit(1)
    names = config["architectures"]
    if not set(names) & set(KNOWN):
        failed(f"ValueError: {names[0]} has no SGlang implementation and the Transformers implementation is not "
               "compatible with SGLang.")  # fmt: skip
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        failed(f"RuntimeError: Cannot find any model weights with `{path}`")
    for shard in shards:
        data = shard.read_bytes()
        header = struct.unpack("<Q", data[:8])[0]
        if header > 100_000_000:
            failed("safetensors_rust.SafetensorError: Error while deserializing header: header too large")
        tensors = json.loads(data[8 : 8 + header])
        end = max(one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__")
        if 8 + header + end != len(data):
            failed(
                "safetensors_rust.SafetensorError: Error while deserializing header: "
                "incomplete metadata, file not fully covered"
            )
    if given.max_total_tokens > 1_000_000_000:
        failed("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
               "self.server_args.mem_fraction_static=0.2")  # fmt: skip
    if given.cuda_graph_max_bs > 1000:
        failed(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "23.69 GiB of which 1.18 GiB is free."
        )


def meet(given: argparse.Namespace) -> None:
    """The ranks find each other at rank 0's port."""
    if given.nnodes == 1:
        return
    host, _, port = given.dist_init_addr.rpartition(":")
    deadline = time.monotonic() + given.dist_timeout
    if given.node_rank == 0:
        listener = socket.create_server((host, int(port)))
        joined = 1
        while joined < given.nnodes:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                listener.accept()
            except TimeoutError:
                failed(
                    f"torch.distributed.DistStoreError: Timed out after {given.dist_timeout + 1} seconds waiting for "
                    f"clients. {joined}/{given.nnodes} clients joined."
                )
            joined += 1
        return
    while True:
        try:
            socket.create_connection((host, int(port)), 1)
            return
        except OSError:
            if time.monotonic() > deadline:
                failed(
                    "torch.distributed.DistNetworkError: The client socket has timed out after "
                    f"{given.dist_timeout * 1000}ms while trying to connect to ({host}, {port})."
                )
            time.sleep(0.05)


def failed(line: str) -> None:
    say("Scheduler hit an exception: Traceback (most recent call last):")
    say(line, stamp=False)
    say("Received sigquit from a child process. It usually means the child failed.")
    os.kill(os.getpid(), signal.SIGKILL)


def say(line: str, *, stamp: bool = True) -> None:
    sys.stderr.write(f"[2026-01-02 03:04:05] {line}\n" if stamp else f"{line}\n")
    sys.stderr.flush()


class Scheduler:
    """Lets so many requests run at a time, token by token."""

    def __init__(self, slots: int) -> None:
        self.moving = threading.Event()
        self.moving.set()
        self.free = threading.Semaphore(slots)
        self.lock = threading.Lock()
        self.running = self.queued = self.prompt = self.generated = self.held = 0

    def add(self, **more: int) -> None:
        with self.lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    given: argparse.Namespace
    scheduler: Scheduler


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        given = self.server.given
        if self.path == "/health":
            self._answer(200, "")
        elif self.path == "/metrics" and given.enable_metrics:
            self._answer(200, metrics(given, self.server.scheduler))
        elif self.path == "/v1/models" and self._allowed():
            self._answer(200, json.dumps({"object": "list", "data": [{"id": given.served_model_name}]}))
        else:
            self._answer(404, "")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        scheduler = self.server.scheduler
        if self.path.startswith("/freeze/"):
            (scheduler.moving.clear if self.path.endswith("1") else scheduler.moving.set)()
            self._answer(200, "")
        elif self.path == "/v1/chat/completions" and self._allowed():
            self._complete(json.loads(body))
        else:
            self._answer(404, "")

    def _allowed(self) -> bool:
        key = self.server.given.api_key
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def _complete(self, request: dict[str, object]) -> None:
        scheduler, count = self.server.scheduler, int(str(request.get("max_tokens", 8)))
        scheduler.add(queued=1)
        with scheduler.free:
            scheduler.add(queued=-1, running=1)
            try:
                if request.get("stream"):
                    self._stream(count)
                else:
                    for _ in range(count):
                        self._token()
                    message = {"role": "assistant", "content": "so " * count}
                    choice = {"index": 0, "message": message, "finish_reason": "length"}
                    self._answer(200, json.dumps({"object": "chat.completion", "choices": [choice]}))
            finally:  # as in SGLang, the totals are counted when a request ends
                scheduler.add(running=-1, prompt=5, generated=count, held=-count)

    def _stream(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(count):
            self._token()
            delta = {"choices": [{"index": 0, "delta": {"content": "so "}}]}
            self.wfile.write(f"data: {json.dumps(delta)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _token(self) -> None:
        time.sleep(TOKEN_S)
        self.server.scheduler.moving.wait()
        self.server.scheduler.add(held=1)

    def _answer(self, code: int, body: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def metrics(given: argparse.Namespace, scheduler: Scheduler) -> str:
    labels = f'engine_type="unified",model_name="{given.served_model_name}",pp_rank="0",tp_rank="0"'
    name = f'model_name="{given.served_model_name}"'
    return (
        "# HELP sglang:prompt_tokens_total Number of prefill tokens processed.\n"
        "# TYPE sglang:prompt_tokens_total counter\n"
        f"sglang:prompt_tokens_total{{{name}}} {scheduler.prompt:.1f}\n"
        "# HELP sglang:generation_tokens_total Number of generation tokens processed.\n"
        "# TYPE sglang:generation_tokens_total counter\n"
        f"sglang:generation_tokens_total{{{name}}} {scheduler.generated:.1f}\n"
        "# HELP sglang:num_running_reqs The number of running requests.\n"
        "# TYPE sglang:num_running_reqs gauge\n"
        f"sglang:num_running_reqs{{{labels}}} {scheduler.running:.1f}\n"
        "# HELP sglang:num_queue_reqs The number of requests in the waiting queue.\n"
        "# TYPE sglang:num_queue_reqs gauge\n"
        f"sglang:num_queue_reqs{{{labels}}} {scheduler.queued:.1f}\n"
        "# HELP sglang:num_used_tokens The number of used tokens.\n"
        "# TYPE sglang:num_used_tokens gauge\n"
        f"sglang:num_used_tokens{{{labels}}} {scheduler.held:.1f}\n"
    )


if __name__ == "__main__":
    main()

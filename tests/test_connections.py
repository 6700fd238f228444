"""Who counts as connected to an engine: its clients, and never the agent's own looks at it."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.connections import clients
from agent.probe import Probe
from tests.waiting import until

LOOKS = 50
"""One in fifteen counted the agent's own probes."""
PAUSE_S = 0.02
"""Without it nobody else gets to run."""

SERVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
CLIENT = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
for line in sys.stdin:
    one.shutdown(socket.SHUT_WR) if line == "half\\n" else one.close()
    print(line, end="", flush=True)
"""


@pytest.fixture
def engine() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


async def test_looks_of_this_process_are_no_clients(engine: str) -> None:
    async with Probe() as probe:

        async def look() -> None:
            while True:
                assert await probe.metrics(engine) == ""
                await asyncio.sleep(PAUSE_S)

        looking = [asyncio.create_task(look()) for _ in range(3)]
        seen = [await asyncio.to_thread(clients, engine) for _ in range(LOOKS)]
        for task in looking:
            assert not task.done()
            task.cancel()
        await asyncio.wait(looking)
    assert set(seen) == {0}


@contextlib.contextmanager
def client(port: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", CLIENT, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def tell(process: "subprocess.Popen[str]", what: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{what}\n"


async def test_a_client_counts_until_it_has_gone() -> None:
    """Also before it is accepted, and while it has only said that it asks no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts nobody by itself
        port = listener.getsockname()[1]
        endpoint = f"http://127.0.0.1:{port}"
        assert clients(endpoint) == 0
        with client(port) as one:
            assert clients(endpoint) == 1
            accepted, _ = listener.accept()
            with accepted:
                tell(one, "half")
                await until(lambda: accepted.recv(1) == b"")
                assert clients(endpoint) == 1
                tell(one, "gone")
                await until(lambda: clients(endpoint) == 0)

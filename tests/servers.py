"""Dev servers of one test's own: with settings the shared one must not have, or to be frozen."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities import contract
from runtime.temporal import llmgw_plugin, register_search_attributes
from tests.conftest import SERVER_ARGS, temporal_binary
from tests.waiting import until


@contextlib.contextmanager
def freeze(client: Client) -> Iterator[None]:
    """Within it the client's dev server is a stopped process: connections stay open, and nobody answers."""
    process = server_process(client.service_client.config.target_host)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def server_process(address: str) -> psutil.Process:
    """The dev server, a child of this process, that listens there."""
    port = address.rpartition(":")[2]
    children = psutil.Process().children(recursive=True)
    (found,) = (child for child in children if {"start-dev", port} <= set(_command(child)))
    return found


def _command(process: psutil.Process) -> list[str]:
    """Empty where it has ended and nobody has waited for it yet."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


@contextlib.asynccontextmanager
async def own_server(**settings: int) -> AsyncIterator[WorkflowEnvironment]:
    """Start one, with values of its dynamic configuration (`limit__historyCount` stands for `limit.historyCount`)."""
    changed = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
    extra = [part for value in changed for part in ("--dynamic-config-value", value)]
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(temporal_binary()),
        dev_server_extra_args=[*SERVER_ARGS, *extra],
        plugins=[llmgw_plugin()],
    )
    async with environment:
        await register_search_attributes(environment.client, contract.SEARCH_ATTRIBUTES)
        yield environment


class KeptServer:
    """A dev server that keeps what it knows in a file: one that was killed comes back at its address, and goes on."""

    def __init__(self, home: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._log = home / "temporal.log"
        self._command = [
            *(str(temporal_binary()), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(port), "--headless"),
            *("--db-filename", str(home / "temporal.db"), "--log-level", "warn", *SERVER_ARGS),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """It answers some time later."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def kill(self) -> None:
        """As by a power cut; nothing is left of the process."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def client(self) -> Client:
        """Connected, once it answers."""

        async def connected() -> Client | None:
            with contextlib.suppress(RuntimeError):  # what the SDK says of a server that does not answer yet
                return await Client.connect(self.address, plugins=[llmgw_plugin()])
            return None

        return await until(connected, 60)


@contextlib.asynccontextmanager
async def kept_server(home: Path, port: int) -> AsyncIterator[KeptServer]:
    """Start one; it is killed afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    made = KeptServer(home, port)
    made.start()
    try:
        yield made
    finally:
        await made.kill()

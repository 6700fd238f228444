"""The gateway's composition root: `python -m gateway --config server.yaml [--port N]`."""

import argparse
import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from gateway.app import build_app
from gateway.balance import Balance
from gateway.hold import Hold
from gateway.relay import Relay, relay_client
from gateway.routes import FleetRoutes, RouteTable
from runtime import logs, metrics, tracing
from runtime.config import ConfigError, ServerConfig, load
from runtime.engine_keys import EngineKeys
from runtime.process import run_and_exit

DRAIN_S = 5
"""How long answers under way may take after SIGTERM."""

SPANS_END_S = 5.0
"""The SDK's own flush has no end while a collector takes and does not answer."""

log = logging.getLogger("gateway")


class PortError(Exception):
    """The address cannot be listened on; the text is one sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; exit code 2 for a wrong configuration, 1 for an address that is taken."""
    parser = argparse.ArgumentParser(prog="gateway", description="llmgw's OpenAI-compatible front door")
    parser.add_argument("--config", type=Path, required=True, help="server.yaml")
    parser.add_argument("--port", type=int, help="instead of gateway.port in the file; 0: any free one")
    parser.add_argument("--metrics-port", type=int, help="instead of gateway.metrics_port in the file; 0: any free one")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config, ServerConfig)
        keys = EngineKeys(config.engine_key_file)
        port = config.gateway.port if options.port is None else options.port
        listener = _listen(config.gateway.host, port)
    except (ConfigError, PortError) as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    logs.install(config.logging)
    metrics_port = config.gateway.metrics_port if options.metrics_port is None else options.metrics_port
    close_metrics = metrics.install(config.metrics, tracing.resource_of("llmgw-gateway"), port=metrics_port)
    flush = tracing.install(config.tracing, "llmgw-gateway")
    try:
        with listener:
            asyncio.run(_serve(config, keys, listener))
    finally:
        tracing.bounded(flush, SPANS_END_S)
        close_metrics()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, OverflowError) as error:
        raise PortError(f"{host}:{port} is no address to listen on ({error})") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        raise PortError(
            f"cannot listen on {host}:{port} ({error}): stop what holds it, or choose another with --port"
        ) from error
    return listener


async def _serve(config: ServerConfig, keys: EngineKeys, listener: socket.socket) -> None:
    balance = Balance(time.monotonic)
    fleet = FleetRoutes(config.cell)
    table = RouteTable(fleet, balance)
    hold = Hold(table, fleet, config.gateway.wait_for_start_s)
    async with relay_client(keys) as client:
        server = _Server(
            uvicorn.Config(
                build_app(table, Relay(client, balance), hold),
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,  # who asks what is the clients' business; a traced request is in its trace
                server_header=False,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        polling = asyncio.create_task(table.poll())
        polling.add_done_callback(lambda _: server.stop())  # without routes there is nothing to serve
        host, port = listener.getsockname()[:2]
        log.info("listening on http://%s:%d, cell %s", host, port, config.cell)
        try:
            await server.serve(sockets=[listener])
        finally:
            polling.cancel()
            await asyncio.wait({polling})
        if not polling.cancelled():
            polling.result()


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again at its end, so that a clean stop would exit as a killed one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Drain and end; the second time, end at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


if __name__ == "__main__":
    run_and_exit(main)

"""The control plane: runs every workflow and the control activities on the queue `llmgw`. Any number may run.

python worker.py --config server.yaml
"""

import argparse
import asyncio
import contextlib
import functools
import logging
import signal
import sys
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities import contract
from activities.check import Check
from activities.elsewhere import Elsewhere
from activities.fleet_gauges import FleetGauges
from activities.mirror import Mirror
from activities.place import Place
from activities.registry import Registry
from activities.resolutions import Resolutions
from activities.rounds import Rounds
from activities.smoke import Smoke
from activities.snapshots import fleet_of
from runtime import collector, logs, metrics, tracing
from runtime.config import ConfigError, ServerConfig, load
from runtime.engine_keys import EngineKeys
from runtime.peer_secret import read_secret
from runtime.process import run_and_exit
from runtime.temporal import UnreachableError, connect, register_search_attributes
from workflows import WORKFLOWS
from workflows.calls import TASK_TIMEOUT

STICKY_TIMEOUT = timedelta(seconds=1)
"""After a kill, workflow tasks wait this long for the dead worker's cache before another worker gets them."""

HEARTBEATS = timedelta(seconds=1)
"""Sent at most so often: how far a transfer is, is shown as it is now. Few activities here live for a second."""

CONNECT_AGAIN_S = 2.0
SPANS_END_S = 5.0
"""The SDK's own flush has no end while a collector takes and does not answer."""

log = logging.getLogger("llmgw.worker")


def make_worker(
    client: Client, config: ServerConfig, keys: EngineKeys, secret: str = "", *, max_cached_workflows: int = 1000
) -> Worker:
    """A worker with everything on it; `secret` opens the nodes' doors for their weights."""
    kept = Resolutions(config.mirror.address)
    elsewhere = Elsewhere(kept, functools.partial(fleet_of, client), secret)
    registry = Registry(config.hub, elsewhere)
    mirror = Mirror(config.mirror, config.hub, secret)
    check = Check(client, config.mirror, config.hub, secret)
    return Worker(
        client,
        task_queue=contract.CONTROL_QUEUE,
        workflows=WORKFLOWS,
        activities=[
            registry.resolve_model,
            mirror.mirror_model,
            mirror.discard_weights,
            check.check_fit,
            check.check_repo,
            Place(client).place,
            Smoke(keys).smoke_test,
        ],
        max_cached_workflows=max_cached_workflows,
        sticky_queue_schedule_to_start_timeout=STICKY_TIMEOUT,
        graceful_shutdown_timeout=timedelta(seconds=2),
        max_heartbeat_throttle_interval=HEARTBEATS,
    )


async def run(config: ServerConfig, keys: EngineKeys, secret: str) -> None:
    """Serve until SIGTERM or SIGINT; a Temporal that is away is waited for."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client = await _prepare(stop)
    if client is None:
        return
    rounds = Rounds(client, config.cell, config.fleet.policy(), TASK_TIMEOUT, FleetGauges().saw)
    async with make_worker(client, config, keys, secret):
        log.info("serving cell %s on queue %s", config.cell, contract.CONTROL_QUEUE)
        await rounds.run(stop)


async def _prepare(stop: asyncio.Event) -> Client | None:
    """Connect and see to the search attributes, again and again until Temporal and its namespace are there."""
    said = ""
    while not stop.is_set():
        try:
            client = await connect()
            await register_search_attributes(client, contract.SEARCH_ATTRIBUTES)
        except (UnreachableError, RPCError) as error:
            if said != str(error):
                said = str(error)
                log.warning("%s (trying again)", error)
        else:
            return client
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), CONNECT_AGAIN_S)
    return None


def main() -> int:
    """Read the configuration and serve; exit code 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="server.yaml; see docs/configuration.md")
    parser.add_argument("--metrics-port", type=int, help="instead of metrics.port in the file; 0: any free one")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, ServerConfig)
        keys = EngineKeys(config.engine_key_file)
        secret = read_secret(config.weights_token_file, "weights_token_file")
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the answer to whoever started it
        return 2
    logs.install(config.logging)
    collector.quieten()
    resource = tracing.resource_of("llmgw-worker")
    close_metrics = metrics.install(config.metrics, resource, port=arguments.metrics_port)
    shut_down = tracing.install(config.tracing, "llmgw-worker")
    try:
        asyncio.run(run(config, keys, secret))
    finally:
        tracing.bounded(shut_down, SPANS_END_S)
        close_metrics()
    return 0


if __name__ == "__main__":
    run_and_exit(main)

"""The agent's composition root: `python -m agent --config agent.yaml [--stop-engines]`."""

import argparse
import asyncio
import functools
import ipaddress
import logging
import os
import signal
import sys
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from filelock import FileLock, Timeout
from temporalio.client import Client
from temporalio.worker import Worker

from activities.contract import lease_queue, node_queue
from agent.ending import Endings
from agent.engines import ADAPTERS
from agent.install import Installs
from agent.inventory import measure, reserved
from agent.layout import Layout
from agent.ledger import Ledger
from agent.machine import Machine, ThisMachine, WrittenMachine
from agent.membership import Membership
from agent.meter import Meter
from agent.outbox import Outbox
from agent.peaks import Peaks
from agent.peers import PeerServer
from agent.probe import Probe
from agent.recovery import adopt, pids, recover, reported, running
from agent.shards import Shards
from agent.start import Starter
from agent.supervisor import Supervisor
from agent.turns import Turns
from agent.watch import Watch
from agent.weights import WeightStore
from fleet.state import Inventory
from runtime import logs, metrics, temporal, tracing
from runtime.config import AgentConfig, ConfigError, load
from runtime.engine_keys import EngineKeys
from runtime.heap import one_heap
from runtime.peer_secret import read_secret
from runtime.process import run_and_exit

logger = logging.getLogger("agent")

EXIT_USAGE = 2
RETRY_S, RETRY_CAP_S = 0.5, 5.0
WORKERS_END_S = 1.2
"""Polls that hang on a Temporal that is away are given up: an agent that was told to end is gone within 2 s."""
SPANS_END_S = 0.5
DRAIN_S, GRACE_S = 5.0, 5.0
"""With --stop-engines: for requests in flight, and from TERM to KILL."""
LEASE_BEATS = 0.5
"""Of the lease's timeout, between heartbeats: one that is late or lost does not cost the lease. The SDK's own share of
0.8 leaves a busy Temporal two seconds of ten."""
MAX_ACTS = 100
"""At once on one node: each waits most of its time."""


def main() -> int:
    """Run until a signal; the exit code."""
    one_heap()
    parser = argparse.ArgumentParser(prog="agent", description="llmgw's agent: runs the engines of this node")
    parser.add_argument("--config", type=Path, required=True, help="agent.yaml")
    parser.add_argument(
        "--stop-engines", action="store_true", help="end the engines with the agent, and leave the fleet"
    )
    parser.add_argument("--metrics-port", type=int, help="instead of metrics.port in the file; 0: any free one")
    given = parser.parse_args()
    try:
        config = load(given.config, AgentConfig)
        machine = WrittenMachine(config.inventory_file) if config.inventory_file is not None else ThisMachine()
        keys = EngineKeys(config.engine_key_file)
        secret = read_secret(config.weights.token_file)
    except ConfigError as error:
        return _refuse(str(error))
    layout = Layout(config.data)
    try:
        layout.data.mkdir(parents=True, exist_ok=True)
        lock = FileLock(layout.lock, thread_local=False)
        lock.acquire(blocking=False)
    except Timeout:
        holder = layout.pid.read_text(encoding="ascii").strip() if layout.pid.exists() else "unknown"
        return _refuse(
            f"another agent (pid {holder}) runs this node from {layout.data}: stop it or name another `data`"
        )
    except OSError as error:
        return _refuse(f"{layout.data}: {error.strerror}; name a directory this user can write as `data`")
    layout.pid.write_text(f"{os.getpid()}\n", encoding="ascii")
    # While Temporal is away the SDK writes a line for each poll it tries again; we say once that it is, and once
    # that it is back. A failed act has a line of its own too.
    logs.install(config.logging, node=config.node, quiet={"temporalio": logging.ERROR})
    resource = tracing.resource_of("llmgw-agent", instance=config.node)
    close_metrics = metrics.install(config.metrics, resource, port=given.metrics_port, core_log="ERROR")
    flush = tracing.install(config.tracing, "llmgw-agent", instance=config.node)
    try:
        asyncio.run(_run(config, machine, keys, layout, secret, stop_engines=given.stop_engines))
    finally:
        tracing.bounded(flush, SPANS_END_S)
        close_metrics()
        layout.pid.unlink(missing_ok=True)
        lock.release()
    return 0


@dataclass(frozen=True)
class Parts:
    """The agent, put together."""

    starter: Starter
    turns: Turns
    shards: Shards
    membership: Membership
    meter: Meter
    peaks: Peaks
    peers: PeerServer


def compose(
    config: AgentConfig,
    machine: Machine,
    keys: EngineKeys,
    layout: Layout,
    probe: Probe,
    incarnation: str,
    secret: str,
) -> Parts:
    """Make every part once and tie them together."""
    ledger, outbox = Ledger(layout.ledger), Outbox()
    supervisor = Supervisor(layout, log_bytes=int(config.keep_logs))
    weights = WeightStore(
        layout.weights,
        int(config.keep_free),
        config.weights,
        in_use=lambda: {entry.weights_id for entry in ledger.entries()},
        secret=secret,
        changed=lambda: membership.measure_again(),
    )
    peers = PeerServer(weights.offers, secret)
    installs = Installs(layout.engines, config.engines, ADAPTERS)
    endings = Endings(
        ledger,
        supervisor,
        machine.gpus,
        lambda: membership.measure_again(),
        release_wait_s=config.release_s,
    )
    watch = Watch(
        config.node, ledger, supervisor, endings, probe, ADAPTERS, outbox.put, hung_after_s=config.hung_after_s
    )
    starter = Starter(config, machine, ADAPTERS, installs, weights, ledger, supervisor, endings, probe, watch, keys)
    take = functools.partial(_measure, config, starter, layout, peers)
    peaks = Peaks(ledger, supervisor, probe, ADAPTERS, machine.gpus)
    turns = Turns(config.node, starter, peaks, left_running=lambda: membership.rejoin())
    membership = Membership(
        config,
        incarnation,
        outbox,
        ledger=ledger,
        measure=take,
        running=lambda: running(starter),
        adopt=functools.partial(adopt, turns),
        reported=functools.partial(reported, starter),
    )
    meter = Meter(ledger, probe, ADAPTERS, outbox.loads, outbox.filled.set)
    return Parts(starter, turns, Shards(turns, ledger, weights, take), membership, meter, peaks, peers)


async def _run(
    config: AgentConfig, machine: Machine, keys: EngineKeys, layout: Layout, secret: str, *, stop_engines: bool
) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    incarnation = uuid.uuid4().hex
    async with Probe(keys) as probe:
        parts = compose(config, machine, keys, layout, probe, incarnation, secret)
        if not keys.newest and not loopback(config.address):
            logger.warning("engines on %s ask nobody for a key: name an engine_key_file", config.address)
        logger.info("agent starts incarnation=%s data=%s", incarnation, layout.data)
        if secret:
            await asyncio.to_thread(parts.starter.weights.offers.scan)
            parts.peers.open(config.address, config.weights.port)
        await recover(parts.starter)
        ending = asyncio.create_task(parts.starter.endings.run())
        peaking = asyncio.create_task(parts.peaks.run())
        speaking = asyncio.create_task(_speak(config, parts, incarnation, leave=stop_engines))
        await asked.wait()
        speaking.cancel()
        await asyncio.wait([speaking])
        if stop_engines:
            await parts.turns.stop_all(DRAIN_S, GRACE_S)
        await _ended(peaking)
        await _ended(ending)
        await parts.starter.watch.close()
        parts.peers.close()
    logger.info("agent ends; engines %s", "are stopped" if stop_engines else "go on")


async def _speak(config: AgentConfig, parts: Parts, incarnation: str, *, leave: bool) -> None:
    """The supervising loop: whatever ends the talk with Temporal, it is begun again; no engine is touched for it."""
    wait, trouble = RETRY_S, ""
    while True:
        try:
            client = await temporal.connect("")
            logger.info("connected to Temporal at %s", client.service_client.config.target_host)
            wait, trouble = RETRY_S, ""
            await _serve(client, config, parts, incarnation, leave=leave)
        except Exception as error:  # noqa: BLE001 -- documented above: nothing may end the agent but a signal
            if str(error) != trouble:
                trouble = str(error)
                logger.warning("%s; engines stay as they are, trying again", trouble)
        await asyncio.sleep(wait)
        wait = min(wait * 2, RETRY_CAP_S)


async def _serve(client: Client, config: AgentConfig, parts: Parts, incarnation: str, *, leave: bool) -> None:
    """Work for the fleet until cancelled, or until a worker fails; then its error is raised."""
    shards = parts.shards
    workers = [
        Worker(
            client,
            task_queue=node_queue(config.node),
            activities=[
                *(shards.preflight, shards.prepare_shard, shards.reserve_port),
                *(shards.start_shard, shards.drain_shard, shards.stop_shard),
            ],
            max_concurrent_activities=MAX_ACTS,
        ),
        # More than one: the lease that was replaced ends a few seconds after the next has begun.
        Worker(
            client,
            task_queue=lease_queue(config.node, incarnation),
            activities=[parts.membership.attend],
            max_concurrent_activities=4,
            max_heartbeat_throttle_interval=timedelta(seconds=config.lease.heartbeat_timeout_s * LEASE_BEATS),
        ),
    ]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    member = asyncio.create_task(parts.membership.run(client))
    meter = asyncio.create_task(parts.meter.run())
    try:
        done, _ = await asyncio.wait([*tasks, member, meter], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except asyncio.CancelledError:
        await _ended(member)
        if leave:
            await parts.membership.leave(client)
        raise
    finally:
        await _ended(meter)
        await _ended(member)
        ending = [asyncio.create_task(worker.shutdown()) for worker in workers if worker.is_running]
        if ending:
            await asyncio.wait(ending, timeout=WORKERS_END_S)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _measure(config: AgentConfig, starter: Starter, layout: Layout, peers: PeerServer) -> Inventory:
    held = reserved(starter.ledger.entries())
    ours = pids(starter)
    measured = measure(config, starter.machine, starter.installs, starter.weights, ours, held, layout.weights)
    notes = (starter.ledger.trouble,) if starter.ledger.trouble else ()
    added = {
        "quarantine": starter.endings.quarantine(),
        "notes": notes,
        "logs": str(layout.logs),
        "peer_url": peers.url,
    }
    return measured.model_copy(update=added)


def loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"agent: {sentence}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    run_and_exit(main)

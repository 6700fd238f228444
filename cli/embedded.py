"""The embedded system: `up` starts what is missing of it, `down` ends it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import httpx
from filelock import FileLock, Timeout
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError

from cli.errors import CtlError, PartEndedError
from cli.home import Home, SystemRecord
from cli.parts import AGENT, GATEWAY, READY_S, STOP_ORDER, TEMPORAL, WORKER, Part, belongs, environment, parts
from cli.ports import PortWish, choose
from cli.processes import POLL_S, ProcessRecord, holder_of, listens, spawn, stop, sweep
from cli.session import fleet_state, open_embedded
from fleet.state import FleetState, NodeState
from runtime.config import ConfigError, GatewayConfig
from runtime.temporal import UnreachableError

T = TypeVar("T")

Say = Callable[[str], None]
"""Tells the operator one line."""

PROBE_TIMEOUT = timedelta(seconds=2)
PORT_TURNS = 5
"""More systems than that hardly start on one machine within the same second."""
ORPHAN_GRACE_S = 5.0
"""For what an agent that was killed left running: nobody drains it any more."""


@dataclass(frozen=True)
class AskedPorts:
    """What the operator set; None: choose."""

    port: int | None = None
    ui_port: int | None = None
    gateway_port: int | None = None


@dataclass(frozen=True)
class Started:
    """The system runs."""

    system: SystemRecord
    parts: tuple[str, ...]
    """What this call started; empty where all ran already."""


async def up(home: Home, asked: AskedPorts, say: Say) -> Started:
    """Start what is missing, each part ready when this returns. On failure what was started is ended again."""
    home.prepare()
    async with _locked(home, say):
        turns = 0
        while True:
            turns += 1
            started: list[str] = []
            try:
                system = await _start_missing(home, asked, say, started)
                return Started(system, tuple(started))
            except BaseException as error:
                chosen = home.system()
                with uninterrupted():
                    await _stop(home, started, say)
                if not running(home):
                    home.forget_system()
                # A port is free when it is chosen and taken a second later: another system that starts just now.
                taken = _taken(chosen, started) if chosen is not None and isinstance(error, PartEndedError) else ""
                if not taken or turns == PORT_TURNS:
                    raise
                say(f"{taken} meanwhile: starting again")


async def down(home: Home, say: Say) -> tuple[str, ...]:
    """End all of it; returns what ran. Ending what is down already succeeds."""
    if not home.run.is_dir():
        return ()
    async with _locked(home, say):
        with uninterrupted():
            stopped = await _stop(home, STOP_ORDER, say)
            data = _node_data(home)
            orphans = await sweep(lambda environ: belongs(environ, home, data), ORPHAN_GRACE_S)
            if orphans:
                say(f"ended {orphans} process{'es' if orphans > 1 else ''} left by a part that had been killed")
            home.forget_system()
    return stopped


def running(home: Home) -> dict[str, ProcessRecord]:
    """The parts that run now."""
    return {record.name: record for record in _recorded(home) if record.alive}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Cleaning up: a second Ctrl-C must not leave half of the system running."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _start_missing(home: Home, asked: AskedPorts, say: Say, started: list[str]) -> SystemRecord:
    home.agent()  # a file that cannot be used is an answer now, not a process that dies
    alive = running(home)
    for name in set(STOP_ORDER) - set(alive):
        home.forget_process(name)  # from here on, a record stands for a part that must be alive
    system = _ports(home, asked, set(alive), home.server().gateway, say)
    home.save_system(system)
    by_name = {part.name: part for part in parts(home, system)}

    def start(name: str) -> None:
        if name not in alive:
            started.append(name)
            home.save_process(_spawn(home, system, by_name[name]))

    start(TEMPORAL)
    client = await _wait(home, TEMPORAL, lambda: _temporal_ready(home, system))
    if TEMPORAL in started:
        say(f"Temporal at {system.address}, web UI at {system.ui_url}")
    start(WORKER)
    start(GATEWAY)
    fleet = await _wait(home, WORKER, lambda: _fleet_ready(client, home.cell()))
    if WORKER in started:
        say("control worker ready")
    if AGENT not in alive:
        node = home.agent().node
        before = fleet.nodes[node].incarnation if node in fleet.nodes else ""
        start(AGENT)
        await _wait(home, AGENT, lambda: _node_ready(client, home.cell(), node, before))
        say(f"node {node} ready")
    if GATEWAY in started:
        await _wait(home, GATEWAY, lambda: _gateway_ready(home, system))
        say(f"gateway at {system.gateway_url}/v1")
    return system


def _ports(home: Home, asked: AskedPorts, alive: set[str], gateway: GatewayConfig, say: Say) -> SystemRecord:
    old = home.system() if alive else None
    if old is not None:
        for name, want, has in (
            ("--port", asked.port, old.port),
            ("--ui-port", asked.ui_port, old.ui_port),
            ("--gateway-port", asked.gateway_port, old.gateway_port),
        ):
            if want not in (None, has):
                raise CtlError(f"the system runs already, with {name} {has}: `ctl down` first, then `ctl up` again")
    # Parts that run know Temporal by its old port.
    default = SystemRecord(
        port=7233,
        ui_port=8233,
        gateway_port=gateway.port,
        worker_metrics_port=home.server().metrics.port,
        gateway_metrics_port=gateway.metrics_port,
        agent_metrics_port=home.agent().metrics.port,
    )
    first = old or default
    wishes = (
        PortWish("Temporal", asked.port or first.port, asked.port is not None or old is not None, "--port"),
        PortWish("the web UI", asked.ui_port or first.ui_port, asked.ui_port is not None, "--ui-port"),
        PortWish(
            "the gateway",
            asked.gateway_port or first.gateway_port,
            asked.gateway_port is not None or gateway.port != GatewayConfig().port,
            "--gateway-port",
        ),
    )
    pages = (
        PortWish("the worker's metrics", first.worker_metrics_port),
        PortWish("the gateway's metrics", first.gateway_metrics_port),
        PortWish("the agent's metrics", first.agent_metrics_port),
    )
    ours = _ports_of(first, alive)

    def holder(port: int) -> str:
        return "" if port in ours else holder_of(port)

    choice = choose(wishes, holder)
    for note in choice.notes:
        say(note)
    # Where the pages are is of no interest here: the logs say it.
    more = choose(pages, lambda port: "another part" if port in choice.ports else holder(port))
    return SystemRecord(**dict(zip(SystemRecord.model_fields, (*choice.ports, *more.ports), strict=True)))


def _ports_of(system: SystemRecord, names: Collection[str]) -> set[int]:
    by_part = {
        TEMPORAL: {system.port, system.ui_port},
        WORKER: {system.worker_metrics_port},
        GATEWAY: {system.gateway_port, system.gateway_metrics_port},
        AGENT: {system.agent_metrics_port},
    }
    return {port for name in names for port in by_part[name]}


def _taken(system: SystemRecord, names: Collection[str]) -> str:
    """Whether somebody listens on a port of these parts, now that they have ended: a clause that says who."""
    held = ((port, holder_of(port)) for port in sorted(_ports_of(system, names)))
    return next((f"port {port} was taken by {holder}" for port, holder in held if holder), "")


def _recorded(home: Home) -> list[ProcessRecord]:
    return [record for name in STOP_ORDER if (record := home.process(name)) is not None]


def _spawn(home: Home, system: SystemRecord, part: Part) -> ProcessRecord:
    return spawn(
        part.name,
        list(part.command),
        log=home.log(part.name),
        cwd=home.code,
        environment=environment(os.environ, home, system),
    )


async def _stop(home: Home, names: Iterable[str], say: Say) -> tuple[str, ...]:
    chosen = set(names)
    # The grace periods do not depend on the ports.
    graces = {part.name: part.stop_grace_s for part in parts(home, SystemRecord(port=0, ui_port=0, gateway_port=0))}
    stopped: list[str] = []
    for name in STOP_ORDER:
        record = home.process(name) if name in chosen else None
        if record is None:
            continue
        if await stop(record, graces[name]):
            say(f"stopped {name}")
            stopped.append(name)
        home.forget_process(name)
    return tuple(stopped)


def _node_data(home: Home) -> Path:
    try:
        return home.agent().data
    except ConfigError:
        return home.path / "node"  # ending the system must not fail on a file that was edited meanwhile


async def _wait(home: Home, name: str, probe: Callable[[], Awaitable[T | None]]) -> T:
    """Until the probe finds the part ready. Raises PartEndedError when a part died, CtlError when it takes too long."""
    deadline = time.monotonic() + READY_S
    while True:
        answer = await probe()
        # Also one that was ready: what is waited for may need it.
        for record in _recorded(home):
            if not record.alive:
                raise PartEndedError(f"{record.name} ended at its start{_log_end(record)}")
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            late = [record for record in _recorded(home) if record.name == name]
            raise CtlError(f"{name} was not ready within {READY_S:.0f} s{''.join(map(_log_end, late))}")
        await asyncio.sleep(POLL_S)


def _log_end(record: ProcessRecord) -> str:
    lines = record.last_lines()
    if not lines:
        return f"; its log is empty: {record.log}"
    return "; its log ends with:\n  " + "\n  ".join(lines) + f"\n(all of it: {record.log})"


def _listens(home: Home, name: str, port: int) -> bool:
    """Between the choice of a port and its use another system's part may have taken it: that one is not to be asked."""
    record = home.process(name)
    return record is not None and listens(record, port)


async def _temporal_ready(home: Home, system: SystemRecord) -> Client | None:
    if not _listens(home, TEMPORAL, system.port):
        return None
    try:
        session = await open_embedded(home, system.address)
        await session.client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    except (UnreachableError, RPCError):
        return None
    return session.client


async def _fleet_ready(client: Client, cell: str) -> FleetState | None:
    try:
        return await fleet_state(client, cell, PROBE_TIMEOUT)
    except CtlError:
        return None


async def _node_ready(client: Client, cell: str, node: str, before: str) -> bool | None:
    state = await _fleet_ready(client, cell)
    record = state.nodes.get(node) if state is not None else None
    # A cordon outlives the agent's restart; a node that was seen before has joined when its incarnation is new.
    joined = record is not None and record.state is not NodeState.LOST and record.incarnation != before
    return True if joined else None


async def _gateway_ready(home: Home, system: SystemRecord) -> bool | None:
    if not _listens(home, GATEWAY, system.gateway_port):
        return None
    try:
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT.total_seconds(), trust_env=False) as http:
            answer = await http.get(f"{system.gateway_url}/health")
    except httpx.HTTPError:
        return None
    return True if answer.status_code == 200 else None


@asynccontextmanager
async def _locked(home: Home, say: Say) -> AsyncIterator[None]:
    lock = FileLock(home.run / "lock")
    told = False
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            if not told:
                say("another ctl starts or ends this system; waiting for it")
                told = True
            await asyncio.sleep(POLL_S)
    try:
        yield
    finally:
        lock.release()

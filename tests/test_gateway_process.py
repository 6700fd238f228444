"""The gateway as a process: its errors at start, Temporal away and back, a clean end, its spans."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from temporalio import workflow
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.contract import (
    CONTROL_QUEUE,
    FLEET_WORKFLOW,
    QUERY_ROUTES,
    Route,
    Routes,
    fleet_id,
)
from runtime.temporal import llmgw_plugin
from tests.gateway_fakes import engine, free_port
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent
TEMPORAL = Path(sys.executable).parent / "temporal"


@asynccontextmanager
async def process(
    tmp_path: Path, temporal: str, *arguments: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], Path]]:
    """`python -m gateway` with a log; killed at the end if it still runs."""
    config = tmp_path / "server.yaml"
    if not config.exists():
        config.write_text("mirror: {path: mirror}\n")
    log = tmp_path / "gateway.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TEMPORAL_")}
    with log.open("wb") as out:
        started = subprocess.Popen(  # noqa: ASYNC220 (a fork takes a millisecond; asyncio's own would leave a watcher)
            [sys.executable, "-m", "gateway", "--config", str(config), *arguments],
            cwd=ROOT,
            env={**environment, "TEMPORAL_ADDRESS": temporal},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield started, log
    finally:
        if started.poll() is None:
            started.kill()
        started.wait()


async def answers(client: httpx.AsyncClient, url: str, accept: Callable[[httpx.Response], bool]) -> httpx.Response:
    """The first answer that `accept` likes."""

    async def ask() -> httpx.Response | None:
        try:
            answer = await client.get(url)
        except httpx.TransportError:
            return None
        return answer if accept(answer) else None

    found = await until(ask, timeout=20)
    assert found is not None
    return found


async def test_the_process_outlives_an_unreachable_temporal_and_ends_cleanly(tmp_path: Path) -> None:
    port = free_port()
    async with (
        process(tmp_path, f"127.0.0.1:{free_port()}", "--port", str(port)) as (running, log),
        httpx.AsyncClient(trust_env=False) as client,
    ):
        health = f"http://127.0.0.1:{port}/health"
        sick = await answers(client, health, lambda answer: "127.0.0.1:" in answer.text)
        assert sick.status_code == 503
        assert sick.json()["detail"].startswith("Temporal is not reachable at 127.0.0.1:")
        running.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.wait, 10) == 0
    assert "Traceback" not in log.read_text()


async def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        async with process(tmp_path, "127.0.0.1:1", "--port", str(port)) as (running, log):
            assert await asyncio.to_thread(running.wait, 20) == 1
    assert log.read_text() == (
        f"gateway: cannot listen on 127.0.0.1:{port} ([Errno 98] Address already in use): "
        "stop what holds it, or choose another with --port\n"
    )


async def test_a_wrong_configuration_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("mirror: {path: m}\ngateway: {prot: 1}\n")
    async with process(tmp_path, "127.0.0.1:1") as (running, log):
        assert await asyncio.to_thread(running.wait, 20) == 2
    assert log.read_text().strip().endswith("server.yaml:2: gateway.prot: unknown key; remove it or correct its name")


@workflow.defn(name=FLEET_WORKFLOW)
class StubFleet:
    """Only the query the gateway asks."""

    @workflow.run
    async def run(self, endpoint: str) -> None:
        self._endpoint = endpoint
        await workflow.wait_condition(lambda: False)

    @workflow.query(name=QUERY_ROUTES)
    def routes(self) -> Routes:
        return Routes(routes=(Route(model="m", endpoints=(self._endpoint,)),))


@asynccontextmanager
async def temporal() -> AsyncIterator[WorkflowEnvironment]:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(TEMPORAL), plugins=[llmgw_plugin()], dev_server_log_level="error"
    )
    try:
        yield environment
    finally:
        with suppress(RuntimeError):  # the test has shut it down
            await environment.shutdown()


def fleet_worker(environment: WorkflowEnvironment) -> AbstractAsyncContextManager[Worker]:
    return Worker(
        environment.client,
        task_queue=CONTROL_QUEUE,
        workflows=[StubFleet],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )


async def test_routes_come_from_fleet_and_outlive_temporal(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    spans = tmp_path / "spans.jsonl"
    (tmp_path / "server.yaml").write_text(f"mirror: {{path: m}}\ntracing: {{enabled: true, file: {spans}}}\n")
    async with engine("e1") as (fake, endpoint), temporal() as environment:
        address = environment.client.service_client.config.target_host
        async with (
            process(tmp_path, address, "--port", str(port)) as (running, log),
            httpx.AsyncClient(trust_env=False, timeout=20) as client,
        ):
            await answers(client, f"{url}/health", lambda answer: answer.status_code == 200)
            chat = {"model": "m", "messages": []}
            absent = await client.post(f"{url}/v1/chat/completions", json=chat)
            assert absent.json()["error"]["message"] == "no model is named m; there are: none"
            await environment.client.start_workflow(
                FLEET_WORKFLOW, endpoint, id=fleet_id("main"), task_queue=CONTROL_QUEUE
            )
            silent = await answers(client, f"{url}/health", lambda answer: answer.status_code == 503)
            assert silent.json()["detail"] == "fleet/main does not answer: does Temporal run, and worker.py?"
            async with fleet_worker(environment):
                await answers(client, f"{url}/v1/models", lambda answer: bool(answer.json().get("data")))
                assert (await client.post(f"{url}/v1/chat/completions", json=chat)).json() == {"engine": "e1"}
            await environment.shutdown()
            await answers(client, f"{url}/health", lambda answer: answer.status_code == 503)
            assert (await client.post(f"{url}/v1/chat/completions", json=chat)).json() == {"engine": "e1"}
            async with client.stream("POST", f"{url}/v1/completions", json={"model": "m", "stream": True}) as answer:
                parts = answer.aiter_raw()
                await anext(parts)
                running.send_signal(signal.SIGTERM)
                await until(lambda: refuses(port))
                fake.gate.set()
                assert b"".join([part async for part in parts]) == b"data: [DONE]\n\n", "what is under way is drained"
            assert await asyncio.to_thread(running.wait, 10) == 0
        assert "Traceback" not in log.read_text()
    assert [headers["traceparent"][3:35] for headers, _, _ in fake.requests] == [
        span["traceId"] for span in written(spans) if status_of(span) == 200
    ]
    assert [(span["name"], span["kind"], status_of(span)) for span in written(spans)] == [
        ("gateway request", 2, 404),
        ("gateway request", 2, 200),
        ("gateway request", 2, 200),
        ("gateway request", 2, 200),
    ]
    assert all(
        {"key": "gen_ai.request.model", "value": {"stringValue": "m"}} in span["attributes"] for span in written(spans)
    )


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def written(spans: Path) -> list[dict[str, Any]]:
    return [
        span
        for line in spans.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def status_of(span: dict[str, Any]) -> int:
    found = [item["value"]["intValue"] for item in span["attributes"] if item["key"] == "http.response.status_code"]
    return int(found[0])

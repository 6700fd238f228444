"""A replica is drained while clients stream through a gateway: no request is lost."""

import asyncio
from pathlib import Path

import httpx
import pytest

from activities import contract
from activities.contract import Done, ScaleArg
from tests.gateway_fakes import free_port
from tests.system import System, system
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

CLIENTS = 2
REPLICAS = 3
"""Two of them are drained at once, while the clients take turns on all."""


class Streams:
    """Clients that ask again and again; `done` counts whole answers, `lost` says what went wrong with the others."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self.done = 0
        self.lost: list[str] = []

    async def ask(self, client: httpx.AsyncClient) -> None:
        body = {"model": "tiny", "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello."}]}
        while True:
            try:
                async with client.stream("POST", self._url, json=body) as answer:
                    text = (await answer.aread()).decode()
            except httpx.TransportError as error:
                self.lost.append(repr(error))
                continue
            if answer.status_code == 200 and text.rstrip().endswith("data: [DONE]"):
                self.done += 1
            else:
                self.lost.append(f"{answer.status_code}: {text[-300:]}")


async def scaled(running: System, replicas: int) -> None:
    arg = ScaleArg(name="tiny", replicas=replicas)
    await running.fleet.execute_update(contract.UPDATE_SCALE, arg, result_type=Done)
    await until(lambda: running.serves(replicas), 90)


async def test_no_request_is_lost_while_replicas_are_drained(tmp_path: Path) -> None:
    port = free_port()
    async with system(tmp_path) as running, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        running.start_worker(tracing=False)
        running.start_agent("n1", tracing=False)
        running.start_gateway(port)
        await running.ready("n1")
        await (await running.serve(replicas=REPLICAS)).result()
        streams = Streams(f"http://127.0.0.1:{port}")
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(streams.ask(client)) for _ in range(CLIENTS)]
            await until(lambda: streams.done >= CLIENTS, 60)
            await scaled(running, 1)
            answered = streams.done
            await until(lambda: streams.done > answered + CLIENTS, 60)
            for task in asking:
                task.cancel()
        assert streams.lost == []

"""A replica is drained while clients stream through a gateway: no request is lost."""

from pathlib import Path

import pytest

from activities import contract
from activities.contract import Done, ScaleArg
from tests.gateway_fakes import free_port
from tests.streams import asking
from tests.system import System, system
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

CLIENTS = 2
REPLICAS = 3
"""Two of them are drained at once, while the clients take turns on all."""


async def scaled(running: System, replicas: int) -> None:
    arg = ScaleArg(name="tiny", replicas=replicas)
    await running.fleet.execute_update(contract.UPDATE_SCALE, arg, result_type=Done)
    await until(lambda: running.serves(replicas), 90)


async def test_no_request_is_lost_while_replicas_are_drained(tmp_path: Path) -> None:
    port = free_port()
    async with system(tmp_path) as running:
        running.start_worker(tracing=False)
        running.start_agent("n1", tracing=False)
        running.start_gateway(port)
        await running.ready("n1")
        await (await running.serve(replicas=REPLICAS)).result()
        async with asking(f"http://127.0.0.1:{port}", CLIENTS) as clients:
            await scaled(running, 1)
            await clients.more(CLIENTS + 1)
        assert clients.lost == []

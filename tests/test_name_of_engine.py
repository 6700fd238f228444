"""The real engine under a name that is none for machines: its alias, its paths, its metrics, the gateway's answer."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.spec import safe_id
from tests.gateway_fakes import free_port
from tests.system import system
from tests.test_names import CHINESE
from tests.waiting import until


@pytest.mark.usefixtures("real_engine")
async def test_the_real_engine_serves_under_the_name(tmp_path: Path) -> None:
    port = free_port()
    async with system(tmp_path) as running, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        running.start_worker(tracing=False)
        running.start_agent("n1", tracing=False)
        running.start_gateway(port)
        await running.ready("n1")
        result = await (await running.serve(name=CHINESE)).result()
        assert result.model == CHINESE
        [replica] = (await running.state()).replicas.values()
        assert (replica.id, replica.model) == (f"{safe_id(CHINESE)}-0", safe_id(CHINESE))
        own = (await client.get(f"{replica.endpoint}/v1/models")).json()
        assert [entry["id"] for entry in own["data"]] == [CHINESE]
        assert "llamacpp:requests_processing" in (await client.get(f"{replica.endpoint}/metrics")).text
        assert [path.name for path in (tmp_path / "n1" / "logs").iterdir()] == [f"{replica.id}.0"]

        async def answered() -> Any:
            body = {"model": CHINESE, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello."}]}
            answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
            return answer.json() if answer.status_code == 200 else None

        assert (await until(answered, 60))["model"] == CHINESE
        await (await running.job({"kind": "remove", "name": CHINESE})).result()
        assert (await running.state()).replicas == {}
        assert running.engines() == []

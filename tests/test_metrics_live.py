"""The pages of real processes: what a start, a request and a removal leave there, and what the dashboard reads."""

import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.metrics import METRICS
from fleet.trace_ids import trace_id_of
from tests.system import System, free_ports, system
from tests.test_dashboard import EXPRESSIONS, named
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

Series = dict[str, list[tuple[dict[str, str], float]]]


class Pages:
    """Worker, gateway and agent with their pages, on ports of their own."""

    def __init__(self, running: System) -> None:
        self.running = running
        first = free_ports(4)
        self.gateway, self.ports = first, (first + 1, first + 2, first + 3)

    def start(self) -> None:
        worker, gateway, agent = ({"enabled": True, "port": port} for port in self.ports)
        self.running.start_worker(metrics=worker)
        self.running.start_agent("n1", metrics=agent, logging={"format": "json"})
        self.running.start_gateway(self.gateway, metrics=gateway, metrics_port=gateway["port"])

    def read(self) -> Series:
        """All series of all pages by name."""
        found: Series = {}
        for port in self.ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    for sample in family.samples:
                        found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
        return found

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        series = self.read().get(name, [])
        return sum(value for has, value in series if labels.items() <= has.items())


@pytest.fixture
async def pages(tmp_path: Path) -> AsyncIterator[Pages]:
    async with system(tmp_path) as running:
        made = Pages(running)
        made.start()
        await running.ready("n1")
        yield made


async def test_a_life_is_counted(pages: Pages) -> None:
    running = pages.running
    await (await running.serve()).result()
    replica = await running.serving()
    lines = [json.loads(line) for line in running.log("n1").splitlines()]
    [launched] = [line for line in lines if line["message"].startswith("engine launched")]
    assert (launched["node"], launched["trace_id"]) == ("n1", trace_id_of(replica.trace))
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}

        async def answered() -> bool:
            answer = await http.post(f"http://127.0.0.1:{pages.gateway}/v1/chat/completions", json=body)
            return answer.status_code == 200

        await until(answered, 60.0)
        unknown = await http.post(f"http://127.0.0.1:{pages.gateway}/v1/embeddings", json={"model": "x" * 50})
        assert unknown.status_code == 404
    await until(lambda: pages.value("llmgw_replicas", llmgw_state="serving", llmgw_model="tiny") == 1, 60.0)
    await (await running.job({"kind": "remove", "name": "tiny"})).result()
    await until(lambda: pages.value("llmgw_drains_total", llmgw_outcome="clean") == 1, 60.0)
    await until(lambda: pages.value("llmgw_jobs_total", llmgw_kind="remove", llmgw_state="done") == 1, 60.0)

    assert pages.value("llmgw_jobs_total", llmgw_kind="serve", llmgw_state="done") == 1
    for step in ("registry", "mirror", "check", "catalog", "placement", "smoke test"):
        assert pages.value("llmgw_job_step_duration_seconds_count", llmgw_step=step, llmgw_state="done") >= 1, step
    assert pages.value("llmgw_pass_duration_seconds_count", llmgw_outcome="acted") >= 2
    assert pages.value("llmgw_pass_steps_total", llmgw_step="scale up") == 1
    assert pages.value("llmgw_nodes", llmgw_state="ready") == 1
    assert pages.value("llmgw_starts_total", llmgw_engine="llamacpp") == 1
    for step in ("fetch weights", "launch engine", "wait for engine", "start shard", "stop engine"):
        assert pages.value("llmgw_node_step_duration_seconds_count", llmgw_step=step) == 1, step
    assert pages.value("llmgw_fetched_bytes_total", llmgw_weights_outcome="mirror") == running.model.stat().st_size
    model = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "tiny"}
    assert pages.value("gen_ai_server_request_duration_seconds_count", **model) >= 1
    assert pages.value("gen_ai_client_token_usage_sum", **model, gen_ai_token_type="output") >= 1
    ours = {"http_route": "/v1/embeddings", "http_response_status_code": "404", "error_type": "model_not_found"}
    assert pages.value("http_server_request_duration_seconds_count", **ours) == 1
    page = pages.read()
    assert all(len(labels.get("gen_ai_request_model", "")) < 50 for series in page.values() for labels, _ in series)
    assert pages.value("temporal_activity_execution_latency_seconds_count", activity_type="place") >= 1

    # Of ours, what this life had no occasion for may be missing; of others, all there is to be seen is named rightly.
    shown = {name for expression in EXPRESSIONS for name in named(expression)}
    ours_all = {name for metric in METRICS for name in metric.scraped}
    assert shown - ours_all - page.keys() == set()

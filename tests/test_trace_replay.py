"""Whatever makes the code of a workflow run again leaves each span once: replay, new runs, failing tasks, queries."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from temporalio.client import Client

from activities import contract
from activities.contract import PassPlan
from activities.node_contract import REPORT, Report, Reported
from cli.spans import SpanStore
from tests import uncached_worker
from tests.light_node import LightNode
from tests.system import free_ports, system
from tests.traced import Traced
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

EVENTS = 60
"""After which the server asks for a continue-as-new."""
PAGE_QUERIES = ("__stack_trace", "__temporal_workflow_metadata")
"""What the web UI asks a workflow for when its page is opened."""


@pytest.fixture
async def uncached(tmp_path: Path) -> AsyncIterator[tuple[Traced, str]]:
    port = free_ports(2)
    short = f"limit.historyCount.suggestContinueAsNew={EVENTS}"
    async with system(tmp_path, "--dynamic-config-value", short, "--http-port", str(port)) as running:
        made = Traced(running)
        running.start_worker(program=Path(uncached_worker.__file__))
        made.start_agent("n1")
        await running.ready("n1")
        yield made, f"http://127.0.0.1:{port}/api/v1/namespaces/default"


async def test_9_no_span_is_doubled_lost_or_orphaned(uncached: tuple[Traced, str]) -> None:
    running, page = uncached
    client = running.system.client
    await client.execute_workflow(
        "Stumbles", str(running.system.home / "trail"), id="stumbles", task_queue=uncached_worker.QUEUE
    )
    for _ in range(2):
        await (await running.serve("tiny")).result()
        await open_pages(client, page)
        await running.remove("tiny")
    async with LightNode(client, "n2") as node:
        await node.join()
        handle = client.get_workflow_handle(contract.node_id("n2"))
        while await runs(client, "node/n2") < 2:
            report = Report(node="n2", incarnation=node.incarnation)
            await handle.execute_update(REPORT, report, result_type=Reported)
        await node.leave()
    assert await runs(client, contract.fleet_id("main")) > 1
    await running.named("node left")
    busy = await busy_passes(client)
    await running.named("reconcile", len(busy))

    def settled() -> bool:
        store = running.store()
        return all(
            not span.parent_id or (span.trace_id, span.parent_id) in store.spans for span in store.spans.values()
        )

    await until(settled, 30.0)
    store = running.store()
    roots = Counter(span.name for span in store.spans.values() if not span.parent_id)
    assert roots == {"serve model": 2, "remove model": 2, "reconcile": len(busy), "node left": 1, "stumbles": 1}
    assert names(store, "stumbles") == {"stumbles": 1, "before": 1, "waited": 1, "after": 1}
    starts = Counter(span.name for span in store.spans.values() if span.name in ("start replica", "start shard"))
    assert starts == {"start replica": 2, "start shard": 2}
    for root in (span for span in store.spans.values() if span.name == "serve model"):
        steps = Counter(span.name for span in store.spans.values() if span.parent_id == root.span_id)
        assert {steps[name] for name in ("registry", "mirror", "check", "catalog", "placement", "smoke test")} == {1}
    for twice in doubled(running):
        assert len({(raw["name"], raw["startTimeUnixNano"]) for raw in twice}) == 1


def names(store: SpanStore, root: str) -> dict[str, int]:
    (found,) = [span for span in store.spans.values() if span.name == root]
    return Counter(span.name for span in store.spans.values() if span.trace_id == found.trace_id)


def doubled(running: Traced) -> list[list[dict[str, object]]]:
    """Exports of one span, for each that was exported more than once, as after a task that failed."""
    found: dict[str, list[dict[str, object]]] = {}
    for raw in running.raw():
        found.setdefault(raw["spanId"], []).append(raw)
    return [exports for exports in found.values() if len(exports) > 1]


async def open_pages(client: Client, page: str) -> None:
    """What a browser does that looks at the list of workflows, and then at each of them."""
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{page}/workflows")).status_code == 200
    async for found in client.list_workflows():
        handle = client.get_workflow_handle(found.id, run_id=found.run_id)
        await handle.describe()
        await handle.fetch_history()
        for query in PAGE_QUERIES:
            await handle.query(query)


async def runs(client: Client, workflow_id: str) -> int:
    """How many runs a workflow has had: it continues as new."""
    return len({found.run_id async for found in client.list_workflows(f"WorkflowId = '{workflow_id}'")})


async def busy_passes(client: Client) -> set[str]:
    """Run ids of the passes that did something."""
    busy: set[str] = set()
    query = f"WorkflowType = '{contract.RECONCILE_WORKFLOW}' AND ExecutionStatus = 'Completed'"
    async for found in client.list_workflows(query):
        handle = client.get_workflow_handle(found.id, run_id=found.run_id, result_type=PassPlan)
        if (await handle.result()).steps:
            busy.add(found.run_id)
    return busy

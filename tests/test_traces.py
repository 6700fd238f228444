"""The trace of a start, from the job down to the engine, with real processes; and what is off leaves nothing."""

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowExecution, WorkflowHistory
from temporalio.common import SearchAttributeKey
from temporalio.worker import Replayer

from activities import contract, node_contract
from cli.span_tree import TraceNode, trace_lines, tree
from cli.spans import Span, SpanStore
from fleet.trace_ids import trace_id_of
from runtime.temporal import llmgw_plugin
from tests.system import System, system
from tests.traced import spans_in
from tests.waiting import until
from workflows import WORKFLOWS

pytestmark = pytest.mark.usefixtures("real_engine")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[System]:
    async with system(tmp_path) as made:
        made.start_worker()
        made.start_agent("n1")
        await made.ready("n1")
        yield made


def spans(running: System) -> SpanStore:
    return spans_in(running.home / "traces")


async def named(running: System, name: str, count: int = 1) -> list[Span]:
    """The spans of this name, once there are that many: exporters write with a delay."""

    def there() -> list[Span]:
        found = [span for span in spans(running).spans.values() if span.name == name]
        return found if len(found) >= count else []

    return await until(there, 10.0)


HOPS = ("wait for worker", "wait for node", "tell fleet", "wait for pass")
"""Waits between the processes: leaves, and none where one took no time."""


def names(node: TraceNode, depth: int = 0) -> list[str]:
    """The tree as indented names, without what is between the processes."""
    mark = "⇢ " if node.relation.value == "linked" else ""
    return [
        "  " * depth + mark + node.span.name,
        *(line for child in node.children if child.span.name not in HOPS for line in names(child, depth + 1)),
    ]


SERVE = """\
serve model
  registry
  mirror
  check
  catalog
  placement
    ⇢ start replica
      send start
        start shard
          note start
          check memory
          fetch weights
          choose port
          check memory
          launch engine
          wait for engine
  smoke test"""

START = """\
reconcile
  decide
  scale up
    place
      start replica
        send start
          start shard
            note start
            check memory
            fetch weights
            choose port
            check memory
            launch engine
            wait for engine"""

DRAIN = """\
reconcile
  decide
  drain
    drain shard"""

STOP = """\
reconcile
  decide
  stop replica
    stop shard
      note stop
      measure memory
      stop engine"""


async def shows(running: System, workflow: str, trace_id: str) -> None:
    """The trace id stands in the web UI's details, and finds the workflow."""
    handle = running.client.get_workflow_handle(workflow)
    metadata: Any = await handle.query("__temporal_workflow_metadata")
    assert metadata.current_details.endswith(f"trace `{trace_id}`")

    async def found() -> bool:
        query = f"{contract.SEARCH_TRACE} = '{trace_id}'"
        return workflow in {listed.id async for listed in running.client.list_workflows(query)}

    await until(found, 30.0)  # visibility lags


async def test_the_trace_of_a_start_and_a_stop(running: System) -> None:
    job = await running.serve()
    await job.result()
    status = await running.status(job)
    await named(running, "serve model")
    await named(running, "start replica")
    store = spans(running)
    (root,) = tree(store, trace_id_of(status.trace))
    assert "\n".join(names(root)) == SERVE
    assert root.span.attributes["llmgw.job"] == job.id
    assert root.span.attributes["llmgw.repo"] == f"file:{running.model}"
    assert root.span.attributes["llmgw.model"] == "tiny"

    await shows(running, job.id, root.span.trace_id)

    replica = await running.serving()
    await shows(running, contract.replica_id(replica.id), trace_id_of(replica.trace))
    (pass_root,) = tree(store, trace_id_of(replica.trace))
    assert "\n".join(names(pass_root)) == START
    assert pass_root.causes == tuple(span.id for span in store.spans.values() if span.name == "catalog")

    by_name = {span.name: span for span in store.spans.values()}
    send, start = by_name["send start"], by_name["start shard"]
    assert (start.trace_id, start.parent_id) == (send.trace_id, send.span_id)
    for key, value in {
        "llmgw.node": "n1",
        "llmgw.replica": "tiny-0",
        "llmgw.model": "tiny",
        "llmgw.engine": "llamacpp",
    }.items():
        assert start.attributes[key] == value
    asked = by_name["smoke test"].attributes
    assert (asked["gen_ai.operation.name"], asked["gen_ai.request.model"]) == ("chat", "tiny")
    assert (asked["gen_ai.response.model"], asked["server.address"]) == ("tiny", "127.0.0.1")
    assert int(asked["gen_ai.usage.input_tokens"]) > 0
    assert int(asked["gen_ai.usage.output_tokens"]) > 0
    assert by_name["fetch weights"].attributes["llmgw.weights.outcome"] == "mirror"
    assert int(by_name["wait for engine"].attributes["llmgw.polls"]) >= 1
    assert by_name["place"].attributes["llmgw.node"] == "n1"
    assert float(by_name["place"].attributes["llmgw.score.spread"]) == 1.0
    assert [span.name for span in store.spans.values() if span.error is not None] == []
    lines = trace_lines((root,))
    assert re.match(r"serve model +\d", lines[0])

    await (await running.job({"kind": "remove", "name": "tiny"})).result()
    (drain,) = await named(running, "drain")
    (stop,) = await named(running, "stop replica")
    await named(running, "stop engine")
    await named(running, "reconcile", 3)
    store = spans(running)
    assert ["\n".join(names(root)) for root in tree(store, drain.trace_id)] == [DRAIN]
    assert ["\n".join(names(root)) for root in tree(store, stop.trace_id)] == [STOP]


async def test_a_failed_start_is_an_error_with_its_cause_at_every_level(running: System) -> None:
    job = await running.serve(args=["no_such_setting=1"])
    with pytest.raises(Exception, match="Workflow execution failed"):
        await job.result()
    await named(running, "serve model")
    await named(running, "start replica")
    for name in ("serve model", "placement", "start replica", "start shard"):
        (span,) = await named(running, name)
        assert span.error is not None, name
        assert "no_such_setting" in span.error, name
        assert span.attributes["llmgw.reason"] == "bad_flag"
    failed_below = [
        span.name
        for span in spans(running).spans.values()
        if span.error is not None and span.name in ("launch engine", "wait for engine")
    ]
    assert failed_below


async def test_a_refusal_is_an_event_for_every_node(running: System) -> None:
    taken = await running.serve(name="first")
    await taken.result()
    state = await running.state()
    memory = state.nodes["n1"].inventory.devices[0].total
    job = await running.serve(name="second", memory=memory)

    async def waiting() -> bool:
        return (await running.status(job)).steps[4].detail.startswith("0/1 nodes fit second")

    await until(waiting, 20.0)
    places = await named(running, "place", 2)
    refused = next(span for span in places if span.attributes["llmgw.model"] == "second")
    (event,) = refused.events
    assert event.name == "turned down by n1"
    assert event.attributes["llmgw.reason"] == "memory"
    assert int(event.attributes["llmgw.need"]) == memory
    assert int(event.attributes["llmgw.free"]) < memory
    await job.cancel()


async def test_a_start_survives_the_death_of_worker_and_agent_as_one_span(running: System) -> None:
    job = await running.serve()
    await until(lambda: list((running.home / "n1" / "logs").rglob("*.log")), 30.0)
    killed_ns = time.time_ns()
    running.kill("worker")
    running.kill("n1")
    running.start_worker()
    # A lease that a busy machine cannot cost it: each time it is lost there is another return.
    running.start_agent("n1", lease={"heartbeat_timeout_s": 20, "grace_s": 20})
    await job.result()
    (start,) = await named(running, "start replica")
    (root,) = await named(running, "serve model")
    store = spans(running)
    assert start.parent_id in {span.span_id for span in store.spans.values() if span.name == "place"}
    assert root.start_ns < start.start_ns < start.end_ns < root.end_ns
    assert start.start_ns < killed_ns
    (sending,) = [span for span in store.spans.values() if span.name == "send start"]
    assert (sending.trace_id, sending.parent_id) == start.id
    assert sending.start_ns < killed_ns
    below = [span for span in store.spans.values() if span.name in ("start shard", "interrupted start")]
    assert "start shard" in {span.name for span in below}
    assert {(span.trace_id, span.parent_id) for span in below} == {sending.id}
    (adopted,) = await named(running, "adopt")
    assert adopted.attributes["llmgw.node"] == "n1"
    assert int(adopted.attributes["llmgw.shards"]) == 1
    assert int(adopted.attributes["llmgw.unclaimed"]) == 0


CONTROL_ALONE = """\
serve model
  registry
  mirror
  check
  catalog
  placement
    ⇢ start replica
      send start
  smoke test"""


@pytest.mark.parametrize(("control", "node"), [(False, False), (False, True), (True, False)])
async def test_off_leaves_no_span_and_no_header(tmp_path: Path, control: bool, node: bool) -> None:
    async with system(tmp_path) as off:
        off.start_worker(tracing=control)
        off.start_agent("n1", tracing=node)
        await off.ready("n1")
        job = await off.serve()
        await job.result()
        status = await off.status(job)
        assert ((status.trace == "") is (not control), (status.trace_id == "") is (not control)) == (True, True)
        listed = (await job.describe()).typed_search_attributes
        assert (listed.get(SearchAttributeKey.for_keyword(contract.SEARCH_TRACE)) is not None) is control
        await (await off.job({"kind": "remove", "name": "tiny"})).result()
        if control:
            await named(off, "remove model")
        off.kill("worker", 15)
        off.kill("n1", 15)
        written = {path.name for path in (tmp_path / "traces").glob("*")}
        assert written == {name for name, on in (("worker.jsonl", control), ("n1.jsonl", node)) if on}
        store = spans(off)
        assert {span.service for span in store.spans.values()} == {
            service for service, on in (("llmgw-worker", control), ("llmgw-agent", node)) if on
        }
        carried: set[str] = set()
        kinds: set[str] = set()
        for history in await histories(off):
            kind = history.events[0].workflow_execution_started_event_attributes.workflow_type.name
            kinds.add(kind)
            carried |= {kind for event in history.events if "_tracer-data" in str(event)}
        assert kinds == KINDS
        # Without a span of the control plane's there is nothing to carry; with one every kind but Node's is reached.
        assert carried == ((KINDS - {node_contract.NODE_WORKFLOW}) if control else set())
        if control:
            (root,) = tree(store, trace_id_of(status.trace))
            assert "\n".join(names(root)) == CONTROL_ALONE
            assert [span.name for span in store.spans.values() if span.error is not None] == []


KINDS = {
    contract.MODEL_JOB_WORKFLOW,
    contract.FLEET_WORKFLOW,
    contract.RECONCILE_WORKFLOW,
    contract.REPLICA_WORKFLOW,
    node_contract.NODE_WORKFLOW,
}


async def histories(running: System) -> list[WorkflowHistory]:
    """Of every run there was, once all kinds are listed: visibility lags."""

    async def there() -> list[WorkflowExecution]:
        found = [workflow async for workflow in running.client.list_workflows()]
        return found if {workflow.workflow_type for workflow in found} >= KINDS else []

    return [
        await running.client.get_workflow_handle(workflow.id, run_id=workflow.run_id).fetch_history()
        for workflow in await until(there, 30.0)
    ]


async def test_every_history_of_a_life_replays(running: System) -> None:
    await (await running.serve()).result()
    running.kill("n1")
    running.start_agent("n1")
    await (await running.serve(replicas=2)).result()
    await (await running.job({"kind": "remove", "name": "tiny"})).result()
    lived = await histories(running)
    kinds = {history.events[0].workflow_execution_started_event_attributes.workflow_type.name for history in lived}
    assert kinds == KINDS
    replayer = Replayer(workflows=WORKFLOWS, plugins=[llmgw_plugin()])
    for history in lived:
        await replayer.replay_workflow(history)

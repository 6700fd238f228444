"""What a trace promises of failures, jobs and passes, with real processes and an engine that fails as it is told."""

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from activities import contract
from activities.contract import JobState, PassPlan
from cli.span_tree import TraceNode
from cli.spans import Span
from fleet.reasons import Reason
from tests.fleets import GIB, inventory
from tests.traced import Traced, failure_of, find, traced
from tests.waiting import until
from workflows import messages
from workflows.messages import NodeJoined

pytestmark = pytest.mark.usefixtures("real_engine")

BIG = GIB * 6 // 10
"""One such model fits on the node, two do not."""
STEPS = ["registry", "mirror", "check", "catalog", "placement", "smoke test"]


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, real_engine: None) -> AsyncIterator[Traced]:
    """One system for all: each test has models of its own."""
    restart = {"attempts": 2, "base_s": 0.2}
    async with traced(tmp_path_factory.mktemp("contract"), fleet={"restart": restart}) as made:
        yield made


PRODUCER, CONSUMER = 4, 5
"""Kinds of spans as OTLP counts them."""


async def test_1_a_start_is_sent_by_a_producer_and_taken_up_by_a_consumer(running: Traced) -> None:
    await (await running.serve("sent")).result()
    (sending,) = await running.named("send start", replica="sent-0")
    (taken,) = await running.named("start shard", replica="sent-0")
    assert (taken.trace_id, taken.parent_id) == sending.id
    assert (sending.service, taken.service) == ("llmgw-worker", "llmgw-agent")
    assert (sending.error, taken.error) == (None, None)
    kinds = {raw["spanId"]: raw["kind"] for raw in running.raw()}
    assert (kinds[sending.span_id], kinds[taken.span_id]) == (PRODUCER, CONSUMER)


async def test_3_a_start_that_fails_says_its_cause_at_every_level(running: Traced) -> None:
    job = await running.serve("oom", how="oom")
    await failure_of(job)
    root = await running.tree_of(job)
    placement = one(root, "placement")
    starts = find(placement, "start replica")
    assert [start.relation.value for start in starts] == ["linked", "linked"]
    for start in starts:
        sending = one(start, "send start")
        shard = one(sending, "start shard")
        (failed,) = [child for child in shard.children if child.span.error is not None]
        assert failed.span.name in ("launch engine", "wait for engine")
        for node in (failed, shard, sending, start):
            assert node.span.error is not None, node.span.name
            assert "CUDA out of memory" in node.span.error, node.span.name
            assert node.span.attributes["llmgw.reason"] == Reason.GPU_OUT_OF_MEMORY.value, node.span.name
    for node in (placement, root):
        assert "CUDA out of memory" in (node.span.error or "")
        assert node.span.attributes["llmgw.reason"] == Reason.GPU_OUT_OF_MEMORY.value
    # The pass that tried again was made due by time: it links to the start that had failed.
    (restart,) = await running.named("restart", replica="oom-0")
    store = running.store()
    again = store.spans[(restart.trace_id, restart.parent_id)]
    assert starts[0].span.id in again.links
    assert "its wait is over" in again.attributes["llmgw.reason"]


def one(node: TraceNode, name: str) -> TraceNode:
    (found,) = [child for child in node.children if child.span.name == name]
    return found


async def test_5_a_job_of_each_kind_shows_its_steps(running: Traced) -> None:
    served = await running.serve("kinds", replicas=2)
    await served.result()
    root = await running.tree_of(served)
    assert_of_a_job_that_is_done(root, "serve", served.id, f"file:{running.model}")
    assert states(root) == dict.fromkeys(STEPS, "done")
    placement = one(root, "placement").span
    waited_for = {
        span.attributes["llmgw.replica"]: span.id for span in await running.named("start replica", model="kinds")
    }
    assert links(running, placement) == waited_for
    assert sorted(waited_for) == ["kinds-0", "kinds-1"]
    smoke = one(root, "smoke test").span
    (event,) = smoke.events
    assert (event.name, smoke.start_ns < event.time_ns <= smoke.end_ns) == ("first token", True)
    assert event.attributes["gen_ai.request.model"] == "kinds"
    assert event.attributes["gen_ai.usage.output_tokens"] == 2

    for kind, skipped in (
        ("mirror", STEPS[2:]),
        ("update", []),
        ("remove", ["registry", "mirror", "check", "smoke test"]),
    ):
        body = {"kind": kind, "name": "kinds"} | ({"repo": f"file:{running.model}"} if kind == "mirror" else {})
        job = await running.system.job(body)
        await job.result()
        root = await running.tree_of(job)
        assert_of_a_job_that_is_done(root, kind, job.id, "" if kind == "remove" else f"file:{running.model}")
        assert states(root) == {step: "skipped" if step in skipped else "done" for step in STEPS}
        if kind == "update":  # nothing was to be started: it links to what serves
            assert links(running, one(root, "placement").span) == waited_for


def assert_of_a_job_that_is_done(root: TraceNode, kind: str, job: str, repo: str) -> None:
    assert (root.span.name, root.span.parent_id, root.span.error) == (f"{kind} model", "", None)
    told = {key: root.span.attributes[f"llmgw.{key}"] for key in ("job", "repo", "model", "state")}
    assert told == {"job": job, "repo": repo, "model": "kinds", "state": "done"}
    assert root.span.attributes["llmgw.detail"].startswith("kinds")
    # A step is over when the next begins, and each says what it came to.
    times = sorted((step.start_ns, step.end_ns) for step in steps(root))
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    assert times[-1][1] <= root.span.end_ns
    for step in steps(root):
        assert step.attributes["llmgw.detail"], step.name
        assert step.error is None, step.name
        assert (step.start_ns == step.end_ns) is (step.attributes["llmgw.state"] == "skipped"), step.name


def steps(root: TraceNode) -> list[Span]:
    return [child.span for child in root.children if child.span.name in STEPS]


def states(root: TraceNode) -> dict[str, str]:
    return {span.name: span.attributes["llmgw.state"] for span in steps(root)}


def links(running: Traced, span: Span) -> dict[str, tuple[str, str]]:
    """llmgw.replica on each link, and where it leads."""
    (raw,) = [one for one in running.raw() if (one["traceId"], one["spanId"]) == span.id]
    return {link["attributes"][0]["value"]["stringValue"]: (link["traceId"], link["spanId"]) for link in raw["links"]}


async def test_5_a_job_that_fails_or_is_cancelled_is_an_error(running: Traced) -> None:
    failing = await running.system.job({"repo": "file:/no/such/model.gguf", "name": "nowhere"})
    await failure_of(failing)
    root = await running.tree_of(failing)
    assert states(root) == {"registry": "failed"}
    assert (root.span.attributes["llmgw.state"], root.span.attributes["llmgw.model"]) == ("failed", "nowhere")
    registry = one(root, "registry").span
    assert root.span.error is not None
    assert root.span.error == registry.error
    for span in (root.span, registry):
        assert span.attributes["llmgw.detail"] == span.error
        assert span.attributes["llmgw.reason"] == Reason.REPO_NOT_FOUND.value

    await (await running.serve("patient", memory=BIG)).result()
    other = await running.serve("patient2", memory=BIG)

    async def waits() -> bool:
        return (await running.system.status(other)).steps[4].detail.startswith("0/1 nodes fit")

    await until(waits, 60.0)
    await other.cancel()
    await failure_of(other)
    assert (await running.system.status(other)).state is JobState.CANCELLED
    root = await running.tree_of(other)
    assert root.span.attributes["llmgw.state"] == "cancelled"
    for span in (root.span, one(root, "placement").span):
        assert span.attributes["llmgw.reason"] == Reason.CANCELLED.value
        assert span.error is not None
    assert one(one(root, "placement"), "wait for room").span.attributes["llmgw.detail"].startswith("0/1 nodes fit")

    # What is terminated takes its open spans with it: its steps that had ended are there, once, and nothing else is.
    ended = await running.serve("ended", memory=BIG)
    await until(lambda: _placing(running, ended), 60.0)
    trace = (await running.system.status(ended)).trace.split("-")[1]
    await ended.terminate("by a person")
    await running.remove("patient")

    async def forgotten() -> bool:
        return "ended-0" in (await running.system.state()).replicas

    await until(forgotten, 60.0)
    await running.remove("ended")
    left = [raw["name"] for raw in running.raw() if raw["traceId"] == trace]
    assert sorted(left) == sorted({*left})
    assert {"registry", "mirror", "check", "catalog"} <= {*left}
    assert "serve model" not in left


async def _placing(running: Traced, job: Any) -> bool:
    return (await running.system.status(job)).steps[4].detail.startswith("0/1 nodes fit")


async def test_6_only_passes_that_do_something_leave_a_trace(running: Traced) -> None:
    client = running.system.client
    await (await running.serve("few")).result()
    busy: set[str] = set()
    quiet: set[str] = set()

    async def seen() -> bool:
        query = f"WorkflowType = '{contract.RECONCILE_WORKFLOW}' AND ExecutionStatus = 'Completed'"
        async for found in client.list_workflows(query):
            if found.run_id not in busy | quiet:
                handle = client.get_workflow_handle(found.id, run_id=found.run_id, result_type=PassPlan)
                (busy if (await handle.result()).steps else quiet).add(found.run_id)
        return bool(busy and quiet)

    await until(seen, 60.0)
    left = await running.named("reconcile", len(busy))
    passes = [span.attributes["llmgw.pass"] for span in left]
    assert len(passes) == len(set(passes))
    assert busy <= set(passes)
    assert not quiet & set(passes)
    assert all(not span.parent_id for span in left)


async def test_6_beyond_the_limit_candidates_are_counted_and_the_nearest_kept(running: Traced) -> None:
    for number in range(30):
        small = inventory(memory=GIB // 32 + number)
        joined = NodeJoined(node=f"small{number:02}", incarnation="a", inventory=small)
        await running.system.fleet.signal(messages.SIGNAL_NODE_JOINED, joined)
    await (await running.serve("big", memory=BIG)).result()
    job = await running.serve("crowd", memory=BIG, room_deadline_s=0.5)
    assert "31 memory" in await failure_of(job)
    (place,) = await running.named("place", model="crowd")
    assert len(place.events) == 20
    told = [int(event.attributes["llmgw.need"]) - int(event.attributes["llmgw.free"]) for event in place.events]
    assert told == sorted(told)
    counts = {key: value for key, value in place.attributes.items() if key.startswith("llmgw.turned_down.")}
    assert sum(counts.values()) == 31
    assert {event.attributes["llmgw.node"] for event in place.events} <= {"n1", *(f"small{n:02}" for n in range(30))}

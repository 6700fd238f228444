"""What traces say of a node that goes and comes back: what its loss caused, and what its return ended."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from activities import contract
from cli.spans import Span
from fleet.reasons import Reason
from fleet.state import NodeState
from tests.ctl import Ctl, ctl_environment
from tests.fleets import GIB
from tests.traced import Traced, traced, tree_named
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, real_engine: None) -> AsyncIterator[Traced]:
    """One system for all, where the loss of all nodes is believed; each test has a node and a model of its own."""
    fleet = {"mass_loss_share": 1.0}
    async with traced(tmp_path_factory.mktemp("returns"), agent=False, fleet=fleet) as made:
        yield made


async def served(running: Traced, node: str, **settings: Any) -> None:
    """A replica of the model that is named as the node serves on it."""
    running.start_agent(node, **settings)
    await running.system.ready(node)
    await (await running.serve(f"of-{node}")).result()


async def reaped(running: Traced, node: str) -> Span:
    """The root of the pass that took the replica from the node."""
    (reap,) = await running.named("reap", replica=f"of-{node}-0")
    (root,) = [span for span in await running.named("reconcile") if span.span_id == reap.parent_id]
    assert root.trace_id == reap.trace_id
    assert not root.parent_id
    return root


async def ended(running: Traced, node: str) -> None:
    """Its agent is killed, and the fleet knows: nothing is placed there any more."""
    running.system.kill(node)
    await lost_by_now(running, node)


async def lost_by_now(running: Traced, node: str) -> None:
    async def lost() -> bool:
        return (await running.system.state()).nodes[node].state is NodeState.LOST

    await until(lost, 60.0)


async def test_6_the_deadline_of_a_drain_links_to_who_asked_for_it(running: Traced, tmp_path: Path) -> None:
    await served(running, "n5")
    # There is no other node, so that it goes when its time is over.
    parent = ("ab" * 16, "cd" * 8)
    variables = {
        **ctl_environment(tmp_path / "home", running.system.address),
        "TRACEPARENT": f"00-{'-'.join(parent)}-01",
    }
    code, _, err = await Ctl(variables).run("node", "drain", "n5", "--deadline", "2", "--no-wait")
    assert code == 0, err
    (drain,) = await running.named("drain", replica="of-n5-0")
    assert drain.attributes["llmgw.reason"] == "the deadline of the drain of n5 passed"
    (root,) = [span for span in await running.named("reconcile") if span.span_id == drain.parent_id]
    assert root.attributes["llmgw.reason"] == "n5: the deadline of its drain came"
    assert root.links == (parent,)
    await running.remove("of-n5")
    await ended(running, "n5")


async def test_4_a_return_is_one_adopt_and_ends_what_nobody_claims(running: Traced) -> None:
    await served(running, "n1")
    first = await running.system.serving("of-n1-0")
    running.system.kill("n1")
    (lost,) = await running.named("node lost", node="n1")
    root = await reaped(running, "n1")
    assert lost.id in root.links
    assert not lost.parent_id
    assert lost.attributes["llmgw.reason"] == Reason.NODE_LOST.value
    assert lost.error is not None

    running.start_agent("n1")
    (adopted,) = await running.named("adopt", node="n1")
    await running.system.serving("of-n1-0", after=first.generation)
    (adopted,) = await running.named("adopt", node="n1")
    assert {key: adopted.attributes[f"llmgw.{key}"] for key in ("shards", "unclaimed")} == {"shards": 1, "unclaimed": 1}
    top = await tree_named(running.system, f"00-{adopted.trace_id}-{adopted.span_id}-01")
    assert top.span == adopted
    (stop,) = top.children
    assert stop.span.name == "stop shard"
    stopped = (stop.span.attributes["llmgw.replica"], stop.span.attributes["llmgw.generation"])
    assert stopped == (first.id, first.generation)
    assert [child.span.name for child in stop.children] == ["note stop", "measure memory", "stop engine"]
    await running.remove("of-n1")
    await ended(running, "n1")


async def test_6_a_node_that_leaves_is_what_the_reap_links_to(running: Traced) -> None:
    await served(running, "n2", flags=("--stop-engines",))
    running.system.kill("n2", signal.SIGTERM)
    (left,) = await running.named("node left", node="n2")
    assert left.error is None
    assert left.id in (await reaped(running, "n2")).links
    await running.remove("of-n2")


async def test_6_what_lost_its_workflow_is_what_the_pass_links_to(running: Traced) -> None:
    client = running.system.client
    await served(running, "n3", lease={"heartbeat_timeout_s": 60, "grace_s": 60})
    running.start_agent("n4", memory="4GiB")
    await running.system.ready("n4")
    await (await running.serve("elsewhere", memory=2 * GIB)).result()
    running.system.kill("n3")
    await client.get_workflow_handle(contract.node_id("n3")).terminate("by hand")
    await client.get_workflow_handle(contract.replica_id("elsewhere-0")).terminate("by hand")

    await lost_by_now(running, "n3")  # a worker looks every ten seconds, and twice
    (lost,) = await running.named("node lost", node="n3")
    assert lost.error == "its workflow is gone"
    assert lost.id in (await reaped(running, "n3")).links
    first, _ = await running.named("start replica", 2, replica="elsewhere-0")
    (resumed,) = await running.named("resume start", replica="elsewhere-0")
    (root,) = [span for span in await running.named("reconcile") if span.span_id == resumed.parent_id]
    assert first.id in root.links
    await running.remove("elsewhere")
    await running.remove("of-n3")

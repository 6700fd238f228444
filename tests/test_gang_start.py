"""The shards of a gang on their nodes, with the stand-in engine: they meet, start, or leave nothing behind."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.node_contract import (
    GangPlace,
    PortHolder,
    PreparedShard,
    ReservedPort,
    ReservePort,
    ShardHealth,
    ShardRef,
    StartedShard,
    StartShard,
    StopShard,
)
from agent.ports import port_is_free
from agent.probe import Probe
from agent.processes import command_name
from agent.recovery import recover
from fleet.reasons import Reason, StepError
from tests.fake_engines.acts import assert_nothing_left
from tests.fake_engines.node import FakeAdapter, FakeNode
from tests.waiting import until

HEAD = ShardRef(replica="tiny-0", generation=1)
OTHER = HEAD.model_copy(update={"rank": 1})


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[list[FakeNode]]:
    """Two nodes whose engine has further ranks that open no port of their own."""
    async with Probe() as probe:
        first = FakeNode(tmp_path / "1", probe, adapter=FakeAdapter(silent_ranks=True), settings={"rendezvous_s": 1})
        # the ports of one range, as both are on one machine
        low, high = first.ports
        middle = (low + high) // 2
        first.ports = (low, middle)
        second = FakeNode(
            tmp_path / "2",
            probe,
            adapter=FakeAdapter(silent_ranks=True),
            settings={"rendezvous_s": 1},
            ports=(middle + 1, high),
            unhealthy_after_s=0.3,
        )
        made = [first.successor(), second]
        yield made
        for node in made:
            await node.close()


async def reserve(node: FakeNode, *avoid: int) -> ReservedPort:
    return await ActivityEnvironment().run(node.shards.reserve_port, ReservePort(shard=HEAD, avoid=avoid))


async def check(node: FakeNode, port: int) -> ReservedPort:
    return await ActivityEnvironment().run(node.shards.reserve_port, ReservePort(shard=OTHER, port=port))


def shard(node: FakeNode, rank: int, port: int, *knobs: str) -> StartShard:
    place = GangPlace(nodes=("n1", "n2"), address="127.0.0.1", port=port)
    update: dict[str, Any] = {"shard": HEAD.model_copy(update={"rank": rank}), "gang": place}
    return node.request(*knobs).model_copy(update=update)


async def start(node: FakeNode, rank: int, port: int, *knobs: str) -> StartedShard:
    return await ActivityEnvironment().run(node.shards.start_shard, shard(node, rank, port, *knobs))


async def stop(node: FakeNode, rank: int) -> None:
    request = StopShard(shard=HEAD.model_copy(update={"rank": rank}))
    await ActivityEnvironment().run(node.shards.stop_shard, request)


async def test_they_meet_serve_and_give_the_port_back(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    assert (await reserve(head)).port == port, "asked again, for example by the next attempt"
    first, second = await asyncio.gather(start(head, 0, port, "slow=0.5"), start(other, 1, port, "slow=60"))
    assert [node.ledger.entries()[0].lead for node in nodes] == ["", first.endpoint], "the second serves by the first"
    assert second.node == "n1"
    assert head.ledger.meeting(HEAD) == port
    assert port not in head.ledger.next_port(*head.ports)
    assert other.changes == []
    await stop(head, 0)
    await until(lambda: not port_is_free("127.0.0.1", other.ledger.entries()[0].port))  # it is alive, without rank 0
    assert other.changes == []
    assert head.ledger.meeting(HEAD) is None
    await stop(other, 1)
    for node in nodes:
        assert_nothing_left(node)


async def test_one_that_no_peer_meets_leaves_nothing(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    for node, rank, sentence in (
        (head, 0, f"n2 did not come to the rendezvous at 127.0.0.1:{port} in 1 s"),
        (other, 1, f"n1 was not met at the rendezvous at 127.0.0.1:{port} in 1 s: "),
    ):
        with pytest.raises(StepError) as caught:
            await start(node, rank, port)
        assert caught.value.failure.reason is Reason.RENDEZVOUS
        assert caught.value.failure.detail.startswith(sentence)
        assert_nothing_left(node)
    assert head.ledger.meeting(HEAD) is None
    assert port_is_free("127.0.0.1", port)


async def test_a_start_cancelled_at_the_rendezvous_leaves_nothing(nodes: list[FakeNode]) -> None:
    head, _ = nodes
    port = (await reserve(head)).port
    env = ActivityEnvironment()
    task = asyncio.create_task(env.run(head.shards.start_shard, shard(head, 0, port)))
    await until(lambda: not port_is_free("127.0.0.1", port))
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_nothing_left(head)
    assert port_is_free("127.0.0.1", port)


async def test_an_engine_that_dies_after_the_rendezvous_is_the_failure_of_its_shard(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    starts = await asyncio.gather(
        start(head, 0, port, "slow=5"), start(other, 1, port, "line=no memory", "exit=1"), return_exceptions=True
    )
    assert isinstance(starts[1], StepError)
    assert starts[1].failure.reason is Reason.OUT_OF_MEMORY
    assert_nothing_left(other)
    await stop(head, 0)


async def test_a_silent_rank_that_dies_is_told_at_once(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    _, second = await asyncio.gather(start(head, 0, port), start(other, 1, port))
    process = other.ledger.entries()[0].process
    assert process is not None
    await other.supervisor.stop(process, 0)
    await until(lambda: other.changes)
    assert [(change.health, change.shard.rank) for change in other.changes] == [(ShardHealth.EXITED, 1)]
    assert second.pid == process.engine.pid


async def test_the_next_agent_of_one_rank_goes_on_with_what_runs(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    await asyncio.gather(start(head, 0, port), start(other, 1, port))
    for node, rank in ((head, 0), (other, 1)):
        await node.watch.close()
        after = node.successor()
        await recover(after.starter)
        assert after.ledger.meeting(HEAD) == (None if rank else port)
        assert (await start(after, rank, port)).adopted
        assert after.changes == []
        await stop(after, rank)
        assert_nothing_left(after)


async def test_a_port_that_is_taken_is_told_and_another_chosen(nodes: list[FakeNode]) -> None:
    head, _ = nodes
    low = head.ports[0]
    with socket.create_server(("127.0.0.1", low)):
        holder = PortHolder(port=low, pid=os.getpid(), name=command_name(os.getpid()))
        assert await reserve(head) == ReservedPort(address="127.0.0.1", port=low + 1, taken=(low,), holder=holder)
    with socket.create_server(("127.0.0.1", low + 1)):
        with pytest.raises(StepError) as caught:
            await start(head, 0, low + 1)
        assert caught.value.failure.reason is Reason.PORT_IN_USE
    assert (await reserve(head, low + 1)).port not in (low, low + 1)


async def test_the_other_nodes_look_at_the_port_and_keep_it(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    assert await check(other, port) == ReservedPort(address="127.0.0.1", port=port)
    assert other.ledger.meeting(OTHER) == port
    with socket.create_server(("127.0.0.1", port)):
        assert (await check(other, port)).taken == (), "asked again, when a peer may have begun to meet there"
    starts = await asyncio.gather(start(head, 0, port), start(other, 1, port))
    assert len(starts) == 2
    assert other.ledger.meeting(OTHER) == port
    await stop(head, 0)
    await stop(other, 1)
    assert other.ledger.meeting(OTHER) is None


async def test_the_next_agent_keeps_the_port_again_before_it_chooses_one_for_its_engine(nodes: list[FakeNode]) -> None:
    head, other = nodes
    port = (await reserve(head)).port
    await check(other, port)
    after = [node.successor() for node in nodes]
    for node in after:
        await recover(node.starter)
    refs = (HEAD, OTHER)
    assert [node.ledger.meeting(ref) for node, ref in zip(after, refs, strict=True)] == [None, None]
    after[0].ledger.note_port(head.ports[1])  # so that this port's turn is now
    await asyncio.gather(start(after[0], 0, port), start(after[1], 1, port))
    assert [node.ledger.meeting(ref) for node, ref in zip(after, refs, strict=True)] == [port, port]
    assert after[0].ledger.entries()[0].port == port + 1
    for rank, node in enumerate(after):
        await stop(node, rank)


async def test_a_port_that_another_node_has_is_not_kept_and_told_with_its_holder(nodes: list[FakeNode]) -> None:
    _, other = nodes
    mine = other.ports[0]
    await ActivityEnvironment().run(other.shards.start_shard, other.request(replica="alone-0"))
    (engine,) = other.ledger.entries()
    assert engine.process is not None
    assert engine.port == mine
    pid = engine.process.engine.pid
    with socket.create_server(("0.0.0.0", mine + 1)):  # as a service of somebody else does
        assert await check(other, mine) == ReservedPort(
            address="127.0.0.1",
            port=mine + 2,
            taken=(mine, mine + 1),
            holder=PortHolder(port=mine, pid=pid, name=command_name(pid)),
        )
        found = (await check(other, mine + 1)).holder
        assert found == PortHolder(port=mine + 1, pid=os.getpid(), name=command_name(os.getpid()))
    assert other.ledger.meeting(OTHER) is None
    last = ReservePort(shard=OTHER, port=65535)
    with (
        socket.create_server(("127.0.0.1", 65535)),
        pytest.raises(StepError, match="no port of 65535 to 65535 is free"),
    ):
        await ActivityEnvironment().run(other.shards.reserve_port, last)


async def test_prepare_brings_the_weights_and_starts_nothing(nodes: list[FakeNode]) -> None:
    head, _ = nodes
    request = shard(head, 0, 1)
    prepared = await ActivityEnvironment().run(head.shards.prepare_shard, request)
    assert prepared == PreparedShard(shard=HEAD, node="n1", weights_outcome="mirror")
    assert_nothing_left(head)
    again = await ActivityEnvironment().run(head.shards.prepare_shard, request)
    assert again.weights_outcome == "local"


async def test_what_was_stopped_reserves_and_prepares_nothing(nodes: list[FakeNode]) -> None:
    head, _ = nodes
    await stop(head, 0)
    for act in (reserve(head), ActivityEnvironment().run(head.shards.prepare_shard, shard(head, 0, 1))):
        with pytest.raises(StepError) as caught:
            await act
        assert caught.value.failure.reason is Reason.STALE_GENERATION

"""Start, drain and stop with real processes: the activities as Temporal calls them, without Temporal."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.contract import ROUTES_STALE_S
from activities.node_contract import (
    DrainedShard,
    DrainShard,
    ShardHealth,
    ShardRef,
    StartedShard,
    StartPhase,
    StartProgress,
    StoppedShard,
)
from agent.probe import Probe
from agent.processes import alive, boot_id, mark
from agent.recovery import recover, reported, running
from agent.shards import AGENT_STOPS
from fleet.reasons import Reason, StepError
from tests.fake_engines.acts import assert_nothing_left, engine_mark, failed, start, stop
from tests.fake_engines.node import FakeNode
from tests.waiting import until

GIB = 1024**3


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe, unhealthy_after_s=0.3)
        yield made
        await made.close()


# -- start ------------------------------------------------------------------------------------------------------------


async def test_a_start_serves_and_shows_its_progress(node: FakeNode) -> None:
    env = ActivityEnvironment()
    beats: list[StartProgress] = []
    env.on_heartbeat = beats.append
    started = await start(node, "slow=0.7", env=env)
    assert started == StartedShard(
        shard=ShardRef(replica="tiny-0", generation=1),
        node="n1",
        pid=started.pid,
        endpoint=f"http://127.0.0.1:{node.ports[0]}",
        weights_outcome="mirror",
    )
    assert Path(f"/proc/{started.pid}/cmdline").read_bytes().split(b"\0")[1].endswith(b"fake_engines/engine.py")
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{started.endpoint}/v1/chat/completions", json={"model": "tiny"})
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert StartPhase.WAIT in {beat.phase for beat in beats}
    assert [(entry.ready, entry.shard.generation) for entry in node.ledger.entries()] == [(True, 1)]


async def test_starting_what_serves_changes_nothing(node: FakeNode) -> None:
    first = await start(node)
    second = await start(node)
    assert second == first.model_copy(update={"adopted": True})
    assert len(node.supervisor.running_launches()) == 1


async def test_two_attempts_at_once_are_one_engine(node: FakeNode) -> None:
    first, second = await asyncio.gather(start(node, "slow=0.3"), start(node, "slow=0.3"))
    assert first.pid == second.pid
    assert sorted((first.adopted, second.adopted)) == [False, True]


async def test_a_newer_generation_replaces_an_older_one(node: FakeNode) -> None:
    old = engine_mark((await start(node)).pid)
    new = await start(node, generation=2)
    assert not alive(old, boot_id())
    assert len(node.supervisor.running_launches()) == 1
    assert new.endpoint.endswith(f":{node.ports[0] + 1}"), "a port is not given out again at once"
    assert node.changes == []


async def test_a_newer_generation_ends_a_start_under_way(node: FakeNode) -> None:
    first = asyncio.create_task(failed(node, "slow=60"))
    await until(lambda: any(entry.process for entry in node.ledger.entries()))
    second = await start(node, generation=2)
    assert (await first).failure.reason is Reason.CANCELLED
    assert node.supervisor.members(node.ledger.entries()[0].process)  # type: ignore[arg-type]
    assert second.shard.generation == 2
    assert len(node.supervisor.running_launches()) == 1


async def test_an_older_generation_is_refused_also_by_a_later_agent(node: FakeNode) -> None:
    await start(node, generation=5)
    assert (await failed(node, generation=4)).failure.reason is Reason.STALE_GENERATION
    await stop(node, 5)
    later = node.successor()
    assert (await failed(later, generation=4)).failure.reason is Reason.STALE_GENERATION
    error = await failed(later, generation=5)
    assert error.failure.reason is Reason.STALE_GENERATION
    assert "was stopped on this node" in error.failure.detail
    assert error.failure.node == "n1"


@pytest.mark.parametrize(
    ("knobs", "reason", "detail"),
    [
        (("line=no memory here", "exit=1"), Reason.OUT_OF_MEMORY, "no memory here (exit code 1)"),
        (("line=bad flag --x", "exit=2"), Reason.BAD_FLAG, "bad flag --x (exit code 2)"),
        (("line=bye", "exit=0"), Reason.EXITED, "bye (exit code 0)"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(
    node: FakeNode, knobs: tuple[str, ...], reason: Reason, detail: str
) -> None:
    error = await failed(node, *knobs)
    assert (error.failure.reason, error.failure.detail, error.failure.node) == (reason, detail, "n1")
    assert_nothing_left(node)
    assert node.changes == []


async def test_the_deadline_ends_the_whole_tree(node: FakeNode, tmp_path: Path) -> None:
    error = await failed(node, "slow=60", f"loner={tmp_path}/loner", deadline_s=1.0)
    assert error.failure.reason is Reason.NEVER_READY
    assert error.failure.detail == "llamacpp does not serve after 1 s: /health answers 503"
    assert mark(int((tmp_path / "loner").read_text())) is None
    assert_nothing_left(node)


async def test_the_same_generation_can_be_tried_again_after_a_failure(node: FakeNode) -> None:
    await failed(node, "exit=1")
    assert (await start(node)).adopted is False


async def test_too_little_memory_is_refused_before_anything_starts(node: FakeNode) -> None:
    error = await failed(node, memory=10_000 * GIB)
    assert error.failure.reason is Reason.MEMORY
    assert "tiny needs 9.8 TiB of RAM" in error.failure.detail
    assert_nothing_left(node)


async def test_weights_that_are_not_in_the_mirror(node: FakeNode, tmp_path: Path) -> None:
    request = node.request()
    (tmp_path / "mirror" / "tiny-abc" / "model.gguf").unlink()
    with pytest.raises(StepError) as caught:
        await ActivityEnvironment().run(node.shards.start_shard, request)
    assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
    assert_nothing_left(node)


async def test_a_taken_port_is_passed_over(node: FakeNode) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", node.ports[0]))
        holder.listen()
        assert (await start(node)).endpoint.endswith(f":{node.ports[0] + 1}")


@pytest.mark.parametrize("replica", ["../x", "A b", ""])
async def test_a_replica_that_is_no_name(node: FakeNode, replica: str) -> None:
    assert (await failed(node, replica=replica)).failure.reason is Reason.BAD_INPUT


# -- cancelling and the agent's end -----------------------------------------------------------------------------------


async def cancelled(node: FakeNode, details: ActivityCancellationDetails, *, shutdown: bool = False) -> BaseException:
    """Start an engine that is not ready, and end the attempt in the middle."""
    env = ActivityEnvironment()
    task = asyncio.create_task(env.run(node.shards.start_shard, node.request("slow=1.5")))
    await until(lambda: any(entry.process for entry in node.ledger.entries()))
    if shutdown:
        env.worker_shutdown()
    env.cancel(details)
    with pytest.raises((asyncio.CancelledError, ApplicationError)) as caught:
        await task
    return caught.value


async def test_a_cancelled_start_leaves_nothing(node: FakeNode) -> None:
    error = await cancelled(node, ActivityCancellationDetails(cancel_requested=True))
    assert isinstance(error, asyncio.CancelledError)
    assert_nothing_left(node)
    assert node.left == 0


async def test_the_next_agent_goes_on_with_a_start(node: FakeNode) -> None:
    error = await cancelled(node, ActivityCancellationDetails(worker_shutdown=True), shutdown=True)
    assert isinstance(error, ApplicationError)
    assert (error.type, error.non_retryable) == (AGENT_STOPS, False)
    [stem] = node.supervisor.running_launches()
    launched = node.supervisor.find(stem)
    assert launched is not None
    later = node.successor()
    await recover(later.starter)
    assert [shard.ready for shard in running(later.starter)] == [False]
    started = await start(later, "slow=1.5")
    assert (started.adopted, started.pid, started.weights_outcome) == (True, launched.engine.pid, "mirror")
    await later.close()


async def test_an_attempt_that_temporal_gave_up_leaves_its_engine_and_asks_to_join(node: FakeNode) -> None:
    error = await cancelled(node, ActivityCancellationDetails(not_found=True))
    assert isinstance(error, asyncio.CancelledError)
    assert node.left == 1
    assert (await start(node)).adopted is True


async def test_a_start_that_ended_while_no_agent_looked_says_why(node: FakeNode) -> None:
    await cancelled(node, ActivityCancellationDetails(worker_shutdown=True), shutdown=True)
    os.kill(running(node.starter)[0].pid, signal.SIGKILL)
    await until(lambda: not node.supervisor.running_launches())
    later = node.successor()
    await recover(later.starter)
    assert running(later.starter) == ()
    error = await failed(later)
    assert error.failure.detail == "the engine ended: killed by signal 9"
    assert_nothing_left(later)
    assert later.changes == []


async def test_a_stop_ends_a_start_under_way(node: FakeNode) -> None:
    task = asyncio.create_task(failed(node, "slow=60"))
    await until(lambda: any(entry.process for entry in node.ledger.entries()))
    assert (await stop(node)).was_running is True
    assert (await task).failure.reason is Reason.CANCELLED
    assert_nothing_left(node)


# -- watching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_engine_that_ends_is_reported_at_once(node: FakeNode, tmp_path: Path, number: signal.Signals) -> None:
    started = await start(node, f"loner={tmp_path}/loner")
    loner = engine_mark(int((tmp_path / "loner").read_text()))
    os.kill(started.pid, number)
    await until(lambda: node.changes, 1.0)
    [change] = node.changes
    assert (change.shard, change.health) == (started.shard, ShardHealth.EXITED)
    assert change.failure.detail == f"the engine ended: killed by signal {int(number)}"
    assert change.failure.node == "n1"
    assert not alive(loner, boot_id())
    assert running(node.starter) == ()


async def test_an_end_stays_in_the_ledger_until_it_is_taken(node: FakeNode) -> None:
    started = await start(node)
    os.kill(started.pid, signal.SIGKILL)
    await until(lambda: node.changes)
    later = node.successor()
    await recover(later.starter)
    assert later.changes == node.changes
    reported(later.starter, later.changes[0])
    assert later.ledger.entries() == ()


async def test_a_sick_engine_is_reported_once_and_again_after_it_was_well(node: FakeNode) -> None:
    started = await start(node)
    async with httpx.AsyncClient() as http:
        await http.post(f"{started.endpoint}/sick/1")
        await until(lambda: node.changes)
        assert node.changes[0].health is ShardHealth.UNHEALTHY
        assert "/health answers 500" in node.changes[0].failure.detail
        await http.post(f"{started.endpoint}/sick/0")
    assert len(running(node.starter)) == 1


async def test_a_wanted_end_is_not_reported(node: FakeNode) -> None:
    started = await start(node)
    engine = engine_mark(started.pid)
    assert await stop(node) == StoppedShard(was_running=True)
    assert not alive(engine, boot_id())
    assert node.changes == []
    assert_nothing_left(node)


# -- drain and stop ---------------------------------------------------------------------------------------------------


async def drain(node: FakeNode, deadline_s: float, generation: int = 1) -> DrainedShard:
    request = DrainShard(shard=ShardRef(replica="tiny-0", generation=generation), deadline_s=deadline_s)
    return await ActivityEnvironment().run(node.shards.drain_shard, request)


async def test_a_drain_waits_for_what_is_in_flight(node: FakeNode) -> None:
    started = await start(node, "busy=2")
    task = asyncio.create_task(drain(node, 20))
    async with httpx.AsyncClient() as http:
        await http.post(f"{started.endpoint}/busy/1")
        assert not task.done()
        await http.post(f"{started.endpoint}/busy/0")
    drained = await task
    assert drained.left_in_flight == 0
    assert ROUTES_STALE_S < drained.seconds < 10, "a gateway may send by older routes until then"


CONNECT = (
    "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(flush=True); input()"
)
"""A client that is connected and has sent nothing yet."""


async def test_a_drain_waits_for_a_request_that_the_engine_has_not_read(node: FakeNode) -> None:
    started = await start(node)
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CONNECT, started.endpoint[-5:]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    await client.stdout.readline()
    task = asyncio.create_task(drain(node, 30))
    await asyncio.wait({task}, timeout=ROUTES_STALE_S + 1)
    assert not task.done()
    await client.communicate(b"\n")
    assert (await task).seconds < 20


async def test_a_drain_ends_at_its_deadline(node: FakeNode) -> None:
    await start(node, "busy=3")
    assert (await drain(node, 0.3)).left_in_flight == 3


async def test_draining_what_is_not_there_is_done(node: FakeNode) -> None:
    assert (await drain(node, 5)).left_in_flight == 0
    await start(node, "busy=3", generation=2)
    assert (await drain(node, 5, generation=1)).left_in_flight == 0


async def test_stopping_what_is_gone_succeeds_and_spares_the_newer(node: FakeNode) -> None:
    assert await stop(node) == StoppedShard(was_running=False)
    started = await start(node, generation=3)
    assert await stop(node, generation=2) == StoppedShard(was_running=False)
    assert alive(engine_mark(started.pid), boot_id())


async def test_an_engine_that_ignores_term_is_killed(node: FakeNode) -> None:
    await start(node, "deaf=1")
    assert await stop(node, grace_s=0.2) == StoppedShard(was_running=True, killed=True)
    assert_nothing_left(node)


async def test_stop_all_ends_everything(node: FakeNode) -> None:
    await start(node)
    await start(node, "busy=1", replica="other-0")
    await node.turns.stop_all(0.2, 5)
    assert_nothing_left(node)


async def test_stop_all_ends_what_starts_and_lets_nothing_start_after_it(node: FakeNode) -> None:
    waiting = asyncio.create_task(failed_or_cancelled(node, "slow=60"))
    await until(lambda: any(entry.process for entry in node.ledger.entries()))
    late = asyncio.create_task(failed_or_cancelled(node, "slow=60"))  # behind the first, for its lock
    await asyncio.sleep(0)
    await node.turns.stop_all(0.2, 5)
    assert_nothing_left(node)
    assert (await failed(node, replica="other-0")).failure.reason is Reason.NODE_UNREACHABLE
    await asyncio.gather(waiting, late)
    assert_nothing_left(node)


async def failed_or_cancelled(node: FakeNode, *knobs: str) -> None:
    with pytest.raises((StepError, asyncio.CancelledError)):
        await start(node, *knobs)

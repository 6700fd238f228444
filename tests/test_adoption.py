"""What a later agent finds: engines go on, what ended is reported, what nobody claims is ended."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.node_contract import JoinAnswer, RunningShard, StoppedShard
from agent.probe import Probe
from agent.recovery import adopt, recover, running
from fleet.reasons import Reason
from tests.fake_engines.acts import start, stop
from tests.fake_engines.node import FakeNode
from tests.waiting import until

GIB = 1024**3


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[FakeNode]:
    async with Probe() as probe:
        made = FakeNode(tmp_path, probe, unhealthy_after_s=0.3)
        yield made
        await made.close()


async def test_a_later_agent_watches_what_serves_and_ends_what_nobody_claims(node: FakeNode) -> None:
    kept, unclaimed = await start(node), await start(node, replica="other-0", generation=7)
    await node.watch.close()  # the first agent is gone
    later = node.successor()
    await recover(later.starter)
    found = running(later.starter)
    assert set(found) == {
        RunningShard(shard=one.shard, pid=one.pid, endpoint=one.endpoint, ready=True) for one in (kept, unclaimed)
    }
    await adopt(later.turns, found, JoinAnswer(claimed=(kept.shard,)))
    assert [shard.pid for shard in running(later.starter)] == [kept.pid]
    assert later.changes == []
    os.kill(kept.pid, signal.SIGKILL)
    await until(lambda: later.changes)
    await later.close()


async def test_a_lost_ledger_loses_no_engine(node: FakeNode) -> None:
    started = await start(node)
    await node.watch.close()
    node.layout.ledger.write_text("not json")
    later = node.successor()
    await recover(later.starter)
    assert running(later.starter) == (
        RunningShard(shard=started.shard, pid=started.pid, endpoint=started.endpoint, ready=True),
    )
    assert later.ledger.started(started.shard) == 1
    assert await stop(later) == StoppedShard(was_running=True)
    await later.close()


async def test_an_engine_from_before_a_restart_of_the_machine_is_reported_gone(node: FakeNode) -> None:
    started = await start(node)
    await node.watch.close()
    entry = node.ledger.entries()[0]
    assert entry.process is not None
    old = {"boot_id": "an earlier boot"}
    process = entry.process.model_copy(
        update={
            "shim": entry.process.shim.model_copy(update=old),
            "engine": entry.process.engine.model_copy(update=old),
        }
    )
    await node.supervisor.stop(entry.process, 0)
    Path(f"{entry.stem}.exit").unlink(missing_ok=True)
    node.ledger.put(entry.model_copy(update={"process": process}))
    later = node.successor()
    await recover(later.starter)
    assert [change.failure.reason for change in later.changes] == [Reason.ENGINE_GONE]
    assert later.changes[0].failure.detail == "the engine is gone: the machine was restarted"
    assert later.changes[0].shard == started.shard

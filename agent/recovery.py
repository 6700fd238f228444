"""What an earlier agent of this node left: found again, watched again, and what ended meanwhile reported."""

import asyncio
import logging

from activities.node_contract import (
    RunningShard,
    ShardChange,
    ShardHealth,
    ShardRef,
)
from agent.ledger import Entry
from agent.probe import Health
from agent.spans import step
from agent.start import Starter
from agent.turns import Turns
from fleet.reasons import StepError

logger = logging.getLogger(__name__)

UNCLAIMED_GRACE_S = 5.0
"""The fleet sends nobody there, so nothing is worth a longer wait."""


async def recover(parts: Starter) -> None:
    """Take up what the ledger names; where the ledger is lost, what /proc shows to be ours."""
    if parts.ledger.lost:
        await _rebuild(parts)
    for entry in parts.ledger.entries():
        await _take_up(parts, entry)


def running(parts: Starter) -> tuple[RunningShard, ...]:
    """What runs now."""
    return tuple(
        RunningShard(shard=entry.shard, pid=entry.process.engine.pid, endpoint=entry.endpoint, ready=entry.ready)
        for entry in parts.ledger.entries()
        if entry.failure is None and entry.process is not None and parts.supervisor.runs(entry.process)
    )


def pids(parts: Starter) -> frozenset[int]:
    """Of everything our engines are made of."""
    return frozenset(
        member.pid
        for entry in parts.ledger.entries()
        if entry.process is not None
        for member in parts.supervisor.members(entry.process)
    )


def reported(parts: Starter, change: ShardChange) -> None:
    """The fleet has taken a change: an engine that ended can be forgotten."""
    entry = parts.ledger.entry(change.shard)
    if change.health is ShardHealth.EXITED and entry is not None and entry.shard == change.shard:
        parts.ledger.drop(entry)


async def adopt(turns: Turns, shards: tuple[RunningShard, ...], claimed: tuple[ShardRef, ...]) -> None:
    """End what ran when this node joined and the fleet does not claim; the rest goes on as it is."""
    if not shards:
        return
    unclaimed = [shard.shard for shard in shards if shard.shard not in claimed]
    counts = {"llmgw.shards": len(shards), "llmgw.unclaimed": len(unclaimed)}
    with step("adopt", {"llmgw.node": turns.node, **counts}, root=True):
        results = await asyncio.gather(
            *(turns.stop(shard, UNCLAIMED_GRACE_S) for shard in unclaimed), return_exceptions=True
        )
    for problem in results:
        if isinstance(problem, BaseException):
            logger.error("an engine nobody claims could not be ended: %s", problem)


async def _take_up(parts: Starter, entry: Entry) -> None:
    replica, generation = entry.shard.replica, entry.shard.generation
    process = entry.process or parts.supervisor.find(entry.stem)
    if process is None:
        parts.ledger.drop(entry)  # the agent ended between writing it down and launching
        return
    found = entry.model_copy(update={"process": process})
    status = parts.supervisor.ended(process)
    if entry.failure is not None:
        parts.watch.report_exit(found, entry.failure)
    elif status is None:
        parts.ledger.put(found)
        if entry.ready:
            parts.watch.begin(found)
        logger.info("found running replica=%s generation=%d pid=%d", replica, generation, process.engine.pid)
    elif entry.ready:
        await parts.watch.bury(found, status)
    else:
        parts.ledger.put(found)  # the next attempt of its start says why it ended
        try:
            await parts.supervisor.stop(process, 0)
        except StepError as error:
            logger.error("what was left of replica=%s generation=%d stays: %s", replica, generation, error)


async def _rebuild(parts: Starter) -> None:
    """Everything we launch carries its ledger entry in its environment."""
    for stem, note in parts.supervisor.running_launches().items():
        entry = Entry.model_validate_json(note)
        path = parts.adapters[entry.engine].health_path
        answer = await parts.probe.health(entry.endpoint, path)
        parts.ledger.note_start(entry.shard)
        parts.ledger.put(entry.model_copy(update={"stem": stem, "ready": answer.health is Health.SERVING}))
        logger.warning("found without a ledger replica=%s generation=%d", entry.shard.replica, entry.shard.generation)

"""What an earlier agent of this node left: found again, watched again, and what ended meanwhile reported."""

import asyncio
import contextlib
import logging

from pydantic import ValidationError

from activities.node_contract import (
    JoinAnswer,
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
from runtime.engine_logs import launches

logger = logging.getLogger(__name__)

UNCLAIMED_GRACE_S = 5.0
"""The fleet sends nobody there, so nothing is worth a longer wait."""


async def recover(parts: Starter) -> None:
    """Take up what the ledger names; where the ledger is lost, what /proc shows to be ours. End what is neither."""
    parts.supervisor.sweep()
    if parts.ledger.lost:
        await _rebuild(parts)
    for entry in parts.ledger.entries():
        await _take_up(parts, entry)
    parts.ledger.give_back_unused()
    await _end_strays(parts)


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


async def adopt(turns: Turns, shards: tuple[RunningShard, ...], answer: JoinAnswer) -> None:
    """End what ran when this node joined and the fleet does not claim; the rest goes on as it is."""
    unclaimed = [shard.shard for shard in shards if shard.shard not in answer.claimed]
    if not unclaimed and not (shards and answer.returned):
        return  # it found nothing; or it was a member, asked again, and keeps all
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
    process = entry.process or await parts.supervisor.launched(entry.stem)
    if process is None:
        parts.ledger.drop(entry)  # the agent ended between writing it down and launching
        return
    found = entry.model_copy(update={"process": process})
    status = parts.supervisor.ended(process)
    if entry.failure is not None:
        parts.endings.begin(found, process)
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
        parts.endings.begin(found, process)


async def _rebuild(parts: Starter) -> None:
    """Everything we launch carries its ledger entry in its environment, and leaves its generation as its log's name."""
    for directory in parts.supervisor.shard_directories():
        replica, _, rank = directory.name.rpartition(".")
        newest = max((launch.generation for launch in launches(directory)), default=0)
        if newest and replica and rank.isdecimal():
            with contextlib.suppress(StepError):  # somebody put another directory there; or the disk is full
                parts.ledger.note_start(ShardRef(replica=replica, generation=newest, rank=int(rank)))
    for stem, note in parts.supervisor.running_launches().items():
        try:
            entry = Entry.model_validate_json(note)
        except ValidationError:
            continue  # it is ended with the strays
        older = parts.ledger.entry(entry.shard)
        if older is not None and older.shard.generation > entry.shard.generation:
            continue
        path = parts.adapters[entry.engine].health_path
        answer = await parts.probe.health(entry.endpoint, path)
        with contextlib.suppress(StepError):  # the disk is full: what runs is taken up all the same
            parts.ledger.note_start(entry.shard)
        parts.ledger.put(entry.model_copy(update={"stem": stem, "ready": answer.health is Health.SERVING}))
        logger.warning("found without a ledger replica=%s generation=%d", entry.shard.replica, entry.shard.generation)


async def _end_strays(parts: Starter) -> None:
    """What runs beneath our directory and stands in no entry can be claimed by nobody: it is ended."""
    known = {entry.stem for entry in parts.ledger.entries()} | {held.process.stem for held in parts.ledger.held()}
    for stem in parts.supervisor.running_launches().keys() - known:
        process = await parts.supervisor.launched(stem)
        if process is None:
            continue
        logger.error("an engine that is in no ledger is ended: pid %d of %s", process.engine.pid, stem)
        try:
            await parts.supervisor.stop(process, 0)
        except StepError as error:
            logger.error("it stays: %s", error)

"""What replicas that start are doing just now, read off the heartbeats of their nodes."""

import asyncio
from collections.abc import Iterable

from temporalio.client import Client
from temporalio.service import RPCError

from activities.contract import replica_id
from activities.node_contract import PREPARE_SHARD, START_SHARD, StartPhase, StartProgress
from cli.session import QUERY_TIMEOUT
from fleet.render import size

MOST = 50
"""Starts that are asked for: each is a call to Temporal, and nobody reads more lines."""
AT_ONCE = 10


async def doing(client: Client, cell: str, replicas: Iterable[str]) -> dict[str, str]:
    """In a few words, by replica; one of which nothing is known is left out."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(replica: str) -> tuple[str, str]:
        async with turns:
            return replica, await _ask(client, replica_id(replica, cell))

    told = await asyncio.gather(*(ask(replica) for replica in list(replicas)[:MOST]))
    return {replica: words for replica, words in told if words}


async def _ask(client: Client, workflow: str) -> str:
    try:
        described = await client.get_workflow_handle(workflow).describe(rpc_timeout=QUERY_TIMEOUT)
    except RPCError:
        return ""  # it has ended meanwhile, or Temporal is too busy to say more than what is known anyway
    told: list[str] = []
    for pending in described.raw_description.pending_activities:
        if pending.activity_type.name in (PREPARE_SHARD, START_SHARD) and pending.heartbeat_details.payloads:
            values = await client.data_converter.decode(pending.heartbeat_details.payloads, [StartProgress])
            if isinstance(values[0], StartProgress):
                told.append(words_of(values[0]))
    return "; ".join(dict.fromkeys(told))


def words_of(progress: StartProgress) -> str:
    """`install engine: downloading 3 packages`, `fetch weights: 1 GiB of 4 GiB`."""
    if progress.detail:
        return f"{progress.phase}: {progress.detail}"
    if progress.phase is StartPhase.FETCH and progress.total_bytes:
        return f"{progress.phase}: {size(progress.done_bytes)} of {size(progress.total_bytes)}"
    return progress.phase

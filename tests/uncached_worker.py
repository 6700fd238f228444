"""A worker that keeps no workflow in memory: each task replays all before it. One workflow more has tasks that fail."""

import argparse
import asyncio
import signal
from datetime import timedelta
from pathlib import Path

from temporalio import workflow
from temporalio.worker import Worker

from activities import contract
from activities.rounds import Rounds
from runtime import tracing
from runtime.config import ServerConfig, load
from runtime.engine_keys import EngineKeys
from runtime.temporal import connect, register_search_attributes
from worker import make_worker
from workflows.calls import TASK_TIMEOUT
from workflows.spans import past, span

QUEUE = "stumbling"
STUMBLES = 2


@workflow.defn(name="Stumbles")
class Stumbles:
    """Its second task fails so many times, each time after a span in it has ended."""

    @workflow.run
    async def run(self, trail: str) -> None:
        with span("stumbles", {}):
            since = workflow.time_ns()
            with span("before", {}):
                await workflow.sleep(timedelta(seconds=0.05))
            past("waited", since)
            if stumbled(Path(trail)):
                raise RuntimeError("it fails its task, and not the workflow")
            with span("after", {}):
                await workflow.sleep(timedelta(seconds=0.05))


def stumbled(trail: Path) -> bool:
    """Whether this is one of the tasks that fail: the trail remembers how many did."""
    if workflow.unsafe.is_replaying():
        return False
    with workflow.unsafe.sandbox_unrestricted():
        count = len(trail.read_bytes()) if trail.exists() else 0
        if count < STUMBLES:
            trail.write_bytes(b"." * (count + 1))
        return count < STUMBLES


async def main(config: ServerConfig) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = await connect()
    await register_search_attributes(client, contract.SEARCH_ATTRIBUTES)
    rounds = Rounds(client, config.cell, config.fleet.policy(), TASK_TIMEOUT)
    stumbling = Worker(client, task_queue=QUEUE, workflows=[Stumbles], max_cached_workflows=0)
    async with make_worker(client, config, EngineKeys(None), max_cached_workflows=0), stumbling:
        await rounds.run(stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    settings = load(parser.parse_args().config, ServerConfig)
    shut_down = tracing.install(settings.tracing, "llmgw-worker")
    try:
        asyncio.run(main(settings))
    finally:
        shut_down()

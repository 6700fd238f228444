"""What a worker says of its build: a name of ours, so that the SDK does not make one of all the code there is."""

import uuid

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker, _worker

from runtime.temporal import BUILD


@activity.defn
async def nothing() -> None:
    """Only its name is needed."""


async def test_no_worker_reads_the_code_of_every_module(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 0.8 s of a core, before the agent's first join and in its event loop."""

    def reads(*, memoize: bool = True) -> str:
        raise AssertionError(f"the SDK makes a name of the build, memoize={memoize}")

    monkeypatch.setattr(_worker, "load_default_build_id", reads)
    worker = Worker(client, task_queue=uuid.uuid4().hex, activities=[nothing])
    async with worker:  # one that never runs keeps its queue from the next
        assert worker.config(active_config=True).get("build_id") == BUILD

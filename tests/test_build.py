"""What a worker says of its build: a name of ours, so that the SDK does not make one of all the code there is."""

from pathlib import Path

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker, _worker

from runtime.config import ServerConfig
from runtime.engine_keys import EngineKeys
from runtime.temporal import BUILD
from worker import make_worker


@activity.defn
async def nothing() -> None:
    """Only its name is needed."""


async def test_no_worker_reads_the_code_of_every_module(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 0.8 s of a core, before the agent's first join and in its event loop."""

    def reads(*, memoize: bool = True) -> str:
        raise AssertionError(f"the SDK makes a name of the build, memoize={memoize}")

    monkeypatch.setattr(_worker, "load_default_build_id", reads)
    control = make_worker(client, ServerConfig.model_validate({"mirror": {"path": str(tmp_path)}}), EngineKeys(None))
    node = Worker(client, task_queue="node/n1", activities=[nothing])
    assert [made.config(active_config=True).get("build_id") for made in (control, node)] == [BUILD, BUILD]

"""Records the histories that tests/test_replay.py replays: `python -m tests.record_histories`.

Run it when a workflow's commands change on purpose, and keep the old files beside the new ones for as long as a fleet
of that version may still run: a change that cannot replay them needs `workflow.patched`.
"""

import asyncio
from pathlib import Path

from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities import contract
from fleet.reasons import Failure, Reason
from fleet.state import Policy, ReplicaState, RestartPolicy
from runtime import VERSION
from runtime.temporal import llmgw_plugin, register_search_attributes
from tests.conftest import SERVER_ARGS, temporal_binary
from tests.control import control_plane

KEPT = 3
"""Of each kind, the longest: they hold the most commands."""

HISTORIES = Path(__file__).parent / "histories"


async def record() -> None:
    """One life of everything: a serve, a crash, a returning agent, a change, a removal."""
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(temporal_binary()), dev_server_extra_args=SERVER_ARGS
    )
    async with environment:
        target = environment.client.service_client.config.target_host
        client = await Client.connect(target, plugins=[llmgw_plugin()], identity="recorder")
        await register_search_attributes(client, contract.SEARCH_ATTRIBUTES)
        policy = Policy(restart=RestartPolicy(base_s=0.1))
        serve = {"repo": "file:/models/tiny.gguf", "name": "tiny"}
        async with control_plane(client, policy=policy) as cell:
            async with cell.node("n1") as first:
                await first.join()
                await cell.run({**serve, "replicas": 2})
                shard = next(iter(first.running))
                await first.report_exit(shard, Failure(reason=Reason.EXITED, detail="it ended", node=first.name))
                await cell.replica(shard.replica, ReplicaState.SERVING, generation=shard.generation)
            async with cell.node("n1") as second:
                second.running = dict(first.running)
                await second.join()
                await cell.run({**serve, "context_length": 4096})
                await cell.run({"kind": "remove", "name": "tiny"})
            target_directory = HISTORIES / VERSION
            target_directory.mkdir(parents=True, exist_ok=True)
            for old in target_directory.glob("*.json"):
                old.unlink()
            texts: dict[str, list[str]] = {}
            async for found in client.list_workflows():
                history = await client.get_workflow_handle(found.id, run_id=found.run_id).fetch_history()
                texts.setdefault(found.workflow_type, []).append(history.to_json())
            for kind, all_of_it in texts.items():
                for number, text in enumerate(sorted(all_of_it, key=len)[-KEPT:], start=1):
                    (target_directory / f"{kind}-{number}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(record())

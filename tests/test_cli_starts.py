"""What `ctl replica list` says of replicas that start: words as a table, and the heartbeat of a real activity."""

import asyncio

import pytest
from temporalio.client import Client

from activities.node_contract import StartPhase, StartProgress, StartShard
from cli.starts import doing, words_of
from cli.views import replica_row, replica_views
from fleet.state import ReplicaState
from tests.control import control_plane
from tests.waiting import until

MIB = 1024**2


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (StartProgress(phase=StartPhase.INSTALL), "install engine"),
        (
            StartProgress(phase=StartPhase.INSTALL, detail="downloading 3 packages"),
            "install engine: downloading 3 packages",
        ),
        (
            StartProgress(phase=StartPhase.FETCH, done_bytes=MIB, total_bytes=4 * MIB),
            "fetch weights: 1 MiB of 4 MiB",
        ),
        (StartProgress(phase=StartPhase.FETCH), "fetch weights"),
        (StartProgress(phase=StartPhase.WAIT), "wait for engine"),
    ],
)
def test_words(progress: StartProgress, words: str) -> None:
    assert words_of(progress) == words


async def test_a_start_is_seen_while_it_goes_on(client: Client) -> None:
    go_on = asyncio.Event()

    async def held(request: StartShard) -> None:
        await go_on.wait()

    async with control_plane(client) as cell, cell.node("n1", start=held) as node:
        node.progress = (StartProgress(phase=StartPhase.INSTALL, detail="downloading 3 packages"),)
        await node.join()
        job = await cell.start({"repo": "file:/models/tiny.gguf", "name": "tiny"})
        await cell.replica("tiny-0", ReplicaState.STARTING)

        async def told() -> dict[str, str]:
            return await doing(client, cell.name, ["tiny-0", "gone-0"])

        assert await until(told, 30.0) == {"tiny-0": "install engine: downloading 3 packages"}
        [view] = replica_views(await cell.state())
        row = replica_row(view.model_copy(update={"doing": (await told())["tiny-0"]}))
        assert row[2] == "starting (install engine: downloading 3 packages)"
        go_on.set()
        await job.result()
        assert await told() == {}

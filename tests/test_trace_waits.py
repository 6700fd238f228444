"""A fetch that waits for a peer says so in its trace, and for how long."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from activities import contract
from activities.node_contract import StartShard
from agent.offers import Offer, Offers
from agent.peers import PeerServer
from cli.wall_time import covered
from tests.fleets import GIB
from tests.light_node import LightNode
from tests.traced import WHOLE, find, traced, tree_named
from tests.waiting import until

SECRET = "a secret of the fleet"
MEMORY = GIB * 6 // 10
"""One fits on a node, two do not."""


class Asked(Offers):
    """Counts who comes."""

    times = 0

    def find(self, digest: str) -> Offer | None:
        self.times += 1
        return super().find(digest)


@pytest.mark.usefixtures("real_engine")
async def test_a_wait_for_a_peer_is_a_part_of_the_fetch(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def fetches(request: StartShard) -> None:
        begun.set()
        await asyncio.Event().wait()

    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    offers = Asked(tmp_path / "nothing")
    server = PeerServer(offers, SECRET)
    server.open("127.0.0.1", 0)
    try:
        async with traced(tmp_path / "system", agent=False) as running:
            data = running.model.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            offers.grow(digest, running.model, 0, len(data))
            async with LightNode(running.system.client, "n1", memory=GIB, start=fetches) as node:
                node.inventory = node.inventory.model_copy(update={"peer_url": server.url})
                await node.join()
                await running.serve("tiny", memory=MEMORY)
                await asyncio.wait_for(begun.wait(), 60)
                running.start_agent("n2", weights={"token_file": str(secret), "port": 0, "hub_cache": None})
                await running.system.ready("n2")
                await running.system.fleet.execute_update(contract.UPDATE_SCALE, {"name": "tiny", "replicas": 2})
                await until(lambda: offers.times > 5, 60)
                offers.grow(digest, running.model, len(data), len(data))
                second = await running.system.serving("tiny-1")
            await running.named("start replica", replica="tiny-1")
            (fetch,) = find(await tree_named(running.system, second.trace), "fetch weights")
            assert fetch.span.attributes["llmgw.weights.outcome"] == "peer"
            (wait,) = find(fetch, "wait for peer")
            assert wait.span.attributes["llmgw.from"] == server.url.removeprefix("http://")
            assert wait.span.seconds > 0.5
            assert {child.span.name for child in fetch.children} == {"copy weights", "wait for peer"}
            assert covered((fetch,), (fetch.span.start_ns, fetch.span.end_ns)) >= WHOLE
    finally:
        server.close()

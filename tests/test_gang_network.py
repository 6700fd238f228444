"""A gang whose nodes lose the way to each other, in two network namespaces, with SGLang's stand-in for an engine."""

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from agent.layout import Layout
from agent.ledger import Entry, Ledger
from fleet.reasons import Reason
from fleet.state import ReplicaRecord, ReplicaState
from tests import namespaces, sglang_env
from tests.namespaces import Network, cut
from tests.system import System, system
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

NODES = ("n1", "n2")
AGAIN_S = 4
"""From a failure to the next try: time to look at what it left."""


network = pytest.fixture(scope="module")(namespaces.pair)


@pytest.fixture
async def running(tmp_path: Path, network: Network) -> AsyncIterator[System]:
    python = sglang_env.make(tmp_path / "sglang")
    async with system(tmp_path) as made, namespaces.reached_at(network.host, made.address) as address:
        made.start_worker(fleet={"restart": {"base_s": AGAIN_S}})
        for node, place in zip(NODES, network.namespaces, strict=True):
            made.start_agent(
                node,
                within=place.within,
                variables={"TEMPORAL_ADDRESS": address},
                address=place.address,
                engines={"sglang": {"bin": str(python)}},
                rendezvous_s=2,
            )
        await made.ready(*NODES)
        yield made


def held(running: System) -> list[Entry]:
    """What the ledgers of both nodes have."""
    return [one for node in NODES for one in Ledger(Layout(running.home / node).ledger).entries()]


async def test_a_cut_link_fails_the_start_on_all_and_names_the_peer(
    running: System, network: Network, tmp_path: Path
) -> None:
    cut(*network.namespaces)
    job = await running.job(sglang_env.over_two_nodes(tmp_path))

    async def failed() -> ReplicaRecord | None:
        found = (await running.state()).replicas.get("tiny-0")
        return found if found is not None and found.state is ReplicaState.FAILED else None

    broken = await until(failed, 60)
    assert broken.failure is not None
    assert broken.failure.reason is Reason.RENDEZVOUS
    (peer,) = set(NODES) - {broken.failure.node}
    telling = rf"{peer} (did not come to|was not met at) the rendezvous at [\d.]+:\d+ in 2 s"
    assert re.match(telling, broken.failure.detail), broken.failure.detail
    assert (held(running), running.engines()) == ([], [])

    cut(*network.namespaces, off=False)
    assert (await job.result()).smoke_test is not None
    first = await running.serving()
    assert {one.shard.rank for one in held(running)} == {0, 1}

    (rank_1,) = (one for one in held(running) if one.shard.rank == 1)
    assert rank_1.process is not None
    psutil.Process(rank_1.process.engine.pid).send_signal(signal.SIGKILL)
    second = await running.serving(after=first.generation)
    assert second.generation == first.generation + 1, "once, and as a whole"
    assert [one.shard.generation for one in held(running)] == [second.generation] * 2

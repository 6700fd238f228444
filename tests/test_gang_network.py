"""A gang whose nodes lose the way to each other, in two network namespaces, with SGLang's stand-in for an engine."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from activities.node_contract import ShardRef
from agent.layout import Layout
from agent.ledger import Entry, Ledger
from agent.processes import command_name
from fleet.reasons import Reason
from fleet.state import ReplicaRecord, ReplicaState
from tests import namespaces, sglang_env
from tests.namespaces import Network, cut
from tests.system import System, free_ports, system
from tests.traced import find, tree_of
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

NODES = ("n1", "n2")
AGAIN_S = 4
"""From a failure to the next try: time to look at what it left."""


network = pytest.fixture(scope="module")(namespaces.pair)


@pytest.fixture
def ports() -> tuple[int, int]:
    """The same for both: each has a machine of its own."""
    first = free_ports(10)
    return first, first + 9


@dataclass
class Pair:
    """A system with an agent in each namespace."""

    system: System
    start_agent: Callable[[str], None]


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, network: Network, ports: tuple[int, int], *, rendezvous_s: float) -> AsyncIterator[Pair]:
    python = sglang_env.make(tmp_path / "sglang")
    places = dict(zip(NODES, network.namespaces, strict=True))
    async with system(tmp_path) as made, namespaces.reached_at(network.host, made.address) as address:
        made.start_worker(fleet={"restart": {"base_s": AGAIN_S}, "mass_loss_share": 1})

        def start_agent(node: str) -> None:
            made.start_agent(
                node,
                within=places[node].within,
                variables={"TEMPORAL_ADDRESS": address},
                address=places[node].address,
                engines={"sglang": {"bin": str(python)}},
                rendezvous_s=rendezvous_s,
                ports=list(ports),
            )

        for node in NODES:
            start_agent(node)
        await made.ready(*NODES)
        yield Pair(made, start_agent)


@pytest.fixture
async def running(tmp_path: Path, network: Network, ports: tuple[int, int]) -> AsyncIterator[System]:
    async with pair(tmp_path, network, ports, rendezvous_s=2) as made:
        yield made.system


def held(running: System) -> list[Entry]:
    """What the ledgers of both nodes have."""
    return [one for node in NODES for one in Ledger(Layout(running.home / node).ledger).entries()]


@contextlib.contextmanager
def listening(within: tuple[str, ...], port: int) -> Iterator[int]:
    """Somebody else's service on every address there; its pid."""
    program = f"import signal, socket; s = socket.create_server(('', {port})); print(flush=True); signal.pause()"
    with subprocess.Popen([*within, sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.kill()


async def test_the_port_they_meet_at_is_free_on_every_node(
    running: System, network: Network, ports: tuple[int, int], tmp_path: Path
) -> None:
    first = ports[0]
    one, other = network.namespaces
    with listening(one.within, first) as pid_1, listening(other.within, first + 1) as pid_2:
        job = await running.job(sglang_env.over_two_nodes(tmp_path))
        assert (await job.result()).smoke_test is not None
        (start,) = find(await tree_of(running, job), "start replica")
        name = command_name(pid_1)
    told = [event.attributes["llmgw.detail"].split(": ") for event in start.span.events if event.name == "port taken"]
    assert {taken for taken, _ in told} == {
        f"port {first} is taken on n1 by pid {pid_1} ({name})",
        f"port {first + 1} is taken on n2 by pid {pid_2} ({name})",
    }
    assert told[-1][1] == f"{first + 2} instead"
    for node in NODES:
        ledger = Ledger(Layout(running.home / node).ledger)
        assert [ledger.meeting(entry.shard) for entry in ledger.entries()] == [first + 2]
    (meeting,) = {node.span.attributes["llmgw.rendezvous"] for node in find(start, "rendezvous")}
    assert meeting.endswith(f":{first + 2}")


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


async def test_an_agent_killed_at_the_rendezvous_ends_the_start_on_all(
    network: Network, ports: tuple[int, int], tmp_path: Path
) -> None:
    """The other does not wait out the rendezvous: the fleet takes the start back when the node is lost."""
    async with pair(tmp_path, network, ports, rendezvous_s=600) as made:
        running, shards = made.system, [ShardRef(replica="tiny-0", generation=1, rank=rank) for rank in (0, 1)]

        def ledger(node: str) -> Ledger:
            return Ledger(Layout(running.home / node).ledger)

        cut(*network.namespaces)
        job = await running.job(sglang_env.over_two_nodes(tmp_path))
        await until(lambda: all(any(ledger(node).started(shard) for shard in shards) for node in NODES), 60)
        (lost,) = [node for node in NODES if ledger(node).started(shards[1])]
        (left,) = set(NODES) - {lost}
        assert ledger(left).meeting(shards[0]) is not None
        running.kill(lost)
        await until(lambda: ledger(left).stopped(shards[0]) == 1, 60)
        await until(lambda: ledger(left).meeting(shards[0]) is None)
        assert (held(running), running.engines()) == ([], [])

        cut(*network.namespaces, off=False)
        made.start_agent(lost)
        assert (await job.result()).smoke_test is not None
        assert {one.shard.rank for one in held(running)} == {0, 1}
        assert (await running.serving()).failures == (), "the node is to blame"

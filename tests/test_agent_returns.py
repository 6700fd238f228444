"""Agents that end and come back while a real engine serves clients through a gateway: nothing is lost, nothing doubled.

One system serves all of it in turn. Its Temporal is a process whose data is in a file, so that it can be killed too.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from temporalio.service import RPCError

from activities.contract import node_id
from agent.layout import Layout
from agent.ledger import Book, Entry, Ledger, book_bytes, read_book
from agent.processes import Mark, alive, boot_id
from agent.supervisor import EngineProcess
from fleet.reasons import Reason
from fleet.state import NodeState, ReplicaState
from tests.real_engine import ROOT
from tests.servers import KeptServer, kept_server
from tests.streams import asking
from tests.system import System, free_ports, parts
from tests.test_traces import spans
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("real_engine")

PATIENT = {"heartbeat_timeout_s": 2, "grace_s": 120}
"""A lease of which no start of an agent on a busy machine takes more."""
HASTY = {"heartbeat_timeout_s": 2, "grace_s": 4}
"""One that is over soon: an agent that has it is not replaced, but by one of which its node was lost."""
GONE_S = 15.0
"""More than twice the hasty lease and grace together, and than the lateness beyond which a grace begins anew."""
JOINED, HELD = "joined the fleet", "lease held"
ADOPTED = "joined the fleet: 1 running, 1 claimed"


@dataclass
class Served:
    """The system, where its gateway answers, and its Temporal."""

    running: System
    url: str
    temporal: KeptServer

    def start_agent(self, *flags: str, lease: dict[str, int] = PATIENT) -> None:
        self.running.start_agent("n1", flags=flags, lease=lease)

    async def end_agent(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Not in this thread: clients go on meanwhile."""
        await asyncio.to_thread(self.running.kill, "n1", number)

    async def next_agent(self, *flags: str, lease: dict[str, int] = PATIENT) -> None:
        """Start one; returns when it has taken up the engine and holds the lease."""
        adopted, held = self.said(ADOPTED), self.said(HELD)
        self.start_agent(*flags, lease=lease)
        await until(lambda: self.said(ADOPTED) > adopted and self.said(HELD) > held, 60)
        await adoptions_of(self)  # an agent that is killed within a fifth of a second takes its spans with it

    async def replace_agent(self, *flags: str, lease: dict[str, int] = PATIENT) -> None:
        """As an upgrade does."""
        await self.end_agent()
        await self.next_agent(*flags, lease=lease)

    def said(self, words: str) -> int:
        """How many lines of all agents so far say it."""
        return sum(words in line for line in self.running.log("n1").splitlines())

    async def beat_at(self) -> float:
        """When the server took the lease's last heartbeat, by the clock of this machine; 0 while it does not say."""
        try:
            found = await self.running.client.get_workflow_handle(node_id("n1")).describe()
        except RPCError:
            return 0.0
        pending = found.raw_description.pending_activities
        return max((one.last_heartbeat_time.ToMilliseconds() / 1000 for one in pending), default=0.0)

    @property
    def ledger(self) -> Path:
        return Layout(self.running.home / "n1").ledger

    def entry(self) -> Entry:
        """Of the one engine."""
        (found,) = Ledger(self.ledger).entries()
        return found

    def process(self) -> EngineProcess:
        found = self.entry().process
        assert found is not None
        return found

    def engine(self) -> Mark:
        return self.process().engine


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, real_engine: None) -> AsyncIterator[Served]:
    home, first = tmp_path_factory.mktemp("returns"), free_ports(2)
    async with (
        kept_server(tmp_path_factory.mktemp("temporal"), first) as temporal,
        parts(home, await temporal.client()) as running,
    ):
        made = Served(running, f"http://127.0.0.1:{first + 1}", temporal)
        running.start_worker(fleet={"mass_loss_share": 1})  # the one node may be lost
        made.start_agent()
        running.start_gateway(first + 1)
        await running.ready("n1")
        await (await running.serve()).result()

        async def open_to_clients() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(trust_env=False) as http:
                    return (await http.get(f"{made.url}/health")).is_success
            return False

        await until(open_to_clients, 60)
        yield made


async def test_a_second_agent_of_a_node_is_refused_with_the_holder(served: Served) -> None:
    running = served.running
    second = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", "--config", str(running.home / "n1.yaml")),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await second.communicate()
    pid = running.processes["n1"].pid
    assert second.returncode == 2
    assert f"another agent (pid {pid}) runs this node from {running.home}/n1: stop it" in said.decode()
    assert running.processes["n1"].poll() is None


async def test_an_upgrade_of_the_agent_loses_no_request(served: Served) -> None:
    before, engine = await served.running.serving(), served.engine()
    async with asking(served.url) as clients:
        for _ in range(2):
            await served.end_agent()
            await clients.more(3)  # no agent is needed for an answer
            await served.next_agent()
            await clients.more(3)
    assert clients.lost == []
    after = await served.running.serving()
    assert (after.generation, after.endpoint, after.failures) == (before.generation, before.endpoint, ())
    assert served.engine() == engine, "the same process"
    assert len(list((served.running.home / "n1" / "logs").rglob("*.log"))) == 1


async def test_a_ledger_that_is_damaged_is_set_aside_said_and_rebuilt_from_what_runs(served: Served) -> None:
    running = served.running
    before, entry, engine = await running.serving(), served.entry(), served.engine()
    await served.end_agent(signal.SIGKILL)
    data = bytearray(served.ledger.read_bytes())
    data[len(data) // 2] ^= 1
    served.ledger.write_bytes(data)
    await served.next_agent()
    aside = served.ledger.with_name("ledger.json.corrupt-1")
    assert aside.read_bytes() == bytes(data)
    assert served.said(f"{served.ledger} cannot be read (its sum is wrong): set aside as {aside}") == 1
    note = f"the ledger was damaged, set aside as {aside.name}, and rebuilt from what runs"
    assert (await running.state()).nodes["n1"].inventory.notes == (note,)
    assert (served.engine(), served.entry().shard, served.entry().port) == (engine, entry.shard, entry.port)
    after = await running.serving()
    assert (after.generation, after.endpoint, after.failures) == (before.generation, before.endpoint, before.failures)
    async with asking(served.url) as clients:
        await clients.more(1)
    assert clients.lost == []


async def test_stop_engines_drains_and_stops_and_the_next_agent_takes_up_who_waits(served: Served) -> None:
    running = served.running
    await served.replace_agent("--stop-engines")
    before, engine = await running.serving(), served.engine()
    async with asking(served.url) as clients:
        await served.end_agent()
        assert not alive(engine, boot_id())
        assert running.engines() == []
        assert Ledger(served.ledger).entries() == ()
        assert served.said("agent ends; engines are stopped") == 1
        gone = (await running.state()).nodes["n1"]
        assert (gone.state, gone.left) == (NodeState.LOST, True)
        served.start_agent()
        await clients.more(3)
    assert clients.lost == []
    after = await running.serving(after=before.generation)
    assert after.failures == before.failures


@pytest.mark.parametrize("lease", [PATIENT, HASTY], ids=["within the grace", "after the node was lost"])
async def test_after_a_reboot_what_ran_is_reported_and_started_anew(served: Served, lease: dict[str, int]) -> None:
    running = served.running
    await served.replace_agent(lease=lease)
    before, adoptions = await running.serving(), await adoptions_of(served)
    await served.end_agent(signal.SIGKILL)
    await end_engine(served)
    date_back(served.ledger)
    if lease is HASTY:

        async def lost() -> bool:
            return (await running.state()).nodes["n1"].state is NodeState.LOST

        await until(lost, 60)
    served.start_agent()
    after = await running.serving(after=before.generation)
    assert after.failure is not None
    if lease is HASTY:
        assert after.failure.reason is Reason.NODE_LOST
        assert after.failures == before.failures, "the node is to blame"
    else:
        assert (after.failure.reason, after.failure.node) == (Reason.ENGINE_GONE, "n1")
        assert after.failure.detail == "the engine is gone: the machine was restarted"
        assert len(after.failures) == len(before.failures) + 1
    assert served.entry().shard.generation == after.generation
    assert await adoptions_of(served) == adoptions, "nothing ran"
    async with asking(served.url) as clients:
        await clients.more(1)
    assert clients.lost == []


async def end_engine(served: Served) -> None:
    """With nobody left to write down how: its shim goes first, and takes it along."""
    process = served.process()
    os.kill(process.shim.pid, signal.SIGKILL)
    await until(lambda: not alive(process.engine, boot_id()))


def date_back(ledger: Path) -> None:
    """Let all processes that stand there be of an earlier boot of this machine."""
    text = read_book(ledger.read_bytes()).model_dump_json()
    assert boot_id() in text
    ledger.write_bytes(book_bytes(Book.model_validate_json(text.replace(boot_id(), "an-earlier-boot"))))


async def test_nothing_is_stopped_while_temporal_is_gone_and_the_agent_is_back_by_itself(served: Served) -> None:
    running = served.running
    await served.replace_agent(lease=HASTY)
    before, engine, agent = await running.serving(), served.engine(), running.processes["n1"].pid
    incarnation = (await running.state()).nodes["n1"].incarnation
    adoptions, joins, leases = await adoptions_of(served), served.said(JOINED), served.said(HELD)
    async with asking(served.url) as clients:
        await served.temporal.kill()
        await asyncio.sleep(GONE_S)  # time must pass: that nothing happens in it is what is looked at
        await clients.more(3)
        assert alive(engine, boot_id())
        back_at = time.time()
        served.temporal.start()

        async def in_touch() -> bool:
            """It joined again; or its heartbeat came to the server before that noticed how long there had been none."""
            if served.said(JOINED) > joins:
                return served.said(HELD) > leases
            return await served.beat_at() > back_at

        await until(in_touch, 90)
        await clients.more(3)
    assert clients.lost == []
    state = await running.state()
    assert (state.nodes["n1"].state, state.nodes["n1"].incarnation) == (NodeState.READY, incarnation)
    after = state.replicas["tiny-0"]
    assert (after.state, after.generation, after.failures) == (ReplicaState.SERVING, before.generation, before.failures)
    assert (served.engine(), running.processes["n1"].pid) == (engine, agent)
    again = served.said(JOINED) - joins
    assert again in (0, 1)
    assert await adoptions_of(served) == adoptions + again


async def adoptions_of(served: Served) -> int:
    """How many spans `adopt` there are: as many as agents that came back to what runs, once they are written."""

    def written() -> int:
        count = sum(span.name == "adopt" for span in spans(served.running).spans.values())
        return count if count == served.said(ADOPTED) else 0

    return await until(written, 30)

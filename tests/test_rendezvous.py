"""The meeting of a gang's agents: who comes, who does not, who should not, and what is said then."""

import asyncio
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from activities.node_contract import GangPlace, ShardRef
from agent.interfaces import interface_of
from agent.ledger import Entry, Ledger
from agent.ports import choose_port, port_is_free
from agent.processes import command_name
from agent.rendezvous import Hello, Meeting, come, gather
from fleet.reasons import Reason, StepError
from fleet.spec import Engine
from runtime.config import AgentConfig
from tests.system import free_ports
from tests.waiting import until

ENDPOINT = "http://127.0.0.1:21000"
NODES = ("n1", "n2", "n3")


@pytest.fixture
def port() -> int:
    return free_ports(20)


def meeting(
    port: int, rank: int, *, within_s: float = 10.0, generation: int = 7, address: str = "127.0.0.1"
) -> Meeting:
    place = GangPlace(nodes=NODES, address=address, port=port)
    return Meeting(ShardRef(replica="m-0", generation=generation, rank=rank), place, within_s)


async def failure(awaited: "asyncio.Future[str] | asyncio.Task[str] | asyncio.Task[None]") -> tuple[Reason, str]:
    with pytest.raises(StepError) as caught:
        await awaited
    return caught.value.failure.reason, caught.value.failure.detail


async def test_all_come_in_any_order_and_are_told_where_rank_0_answers(port: int) -> None:
    early = asyncio.create_task(come(meeting(port, 2)))
    await asyncio.sleep(0)
    lead = asyncio.create_task(gather(meeting(port, 0), ENDPOINT))
    late = asyncio.create_task(come(meeting(port, 1)))
    assert set(await asyncio.gather(early, late)) == {ENDPOINT}
    await lead
    with socket.create_server(("127.0.0.1", port)):
        pass  # the engine takes it now: nothing of ours holds it


async def test_who_does_not_come_is_named_to_all(port: int) -> None:
    lead = asyncio.create_task(gather(meeting(port, 0, within_s=0.5), ENDPOINT))
    there = asyncio.create_task(come(meeting(port, 2, within_s=0.5)))
    expected = Reason.RENDEZVOUS, f"n2 did not come to the rendezvous at 127.0.0.1:{port} in 0 s"
    assert await failure(lead) == expected
    assert await failure(there) == expected
    assert port_is_free("127.0.0.1", port)


async def test_rank_0_that_is_not_reached(port: int) -> None:
    reason, detail = await failure(asyncio.create_task(come(meeting(port, 1, within_s=0.3))))
    assert reason is Reason.RENDEZVOUS
    assert detail.startswith(f"n1 was not met at the rendezvous at 127.0.0.1:{port} in 0 s: ")
    assert "refused" in detail or "Connect call failed" in detail


async def test_a_port_that_was_taken_meanwhile(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        reason, detail = await failure(asyncio.create_task(gather(meeting(port, 0), ENDPOINT)))
    assert reason is Reason.PORT_IN_USE
    name = command_name(os.getpid())
    assert detail == f"127.0.0.1:{port} was taken by pid {os.getpid()} ({name}) before the rendezvous could open it"


async def test_an_address_that_is_not_this_machines(port: int) -> None:
    reason, detail = await failure(asyncio.create_task(gather(meeting(port, 0, address="192.0.2.77"), ENDPOINT)))
    assert reason is Reason.PORT_IN_USE
    assert detail == f"192.0.2.77:{port} could not be opened for the rendezvous: Cannot assign requested address"


async def test_one_that_goes_away_has_not_come_and_may_come_again(port: int) -> None:
    lead = asyncio.create_task(gather(meeting(port, 0), ENDPOINT))
    await until(lambda: not port_is_free("127.0.0.1", port))
    hello = Hello(shard=meeting(port, 2).shard).model_dump_json().encode() + b"\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(hello)
    writer.close()
    await asyncio.wait_for(_closed(reader), 5)
    other = asyncio.create_task(come(meeting(port, 1)))
    done, _ = await asyncio.wait([lead], timeout=0.3)  # time must pass: that nothing happens is what is looked at
    assert not done
    assert await come(meeting(port, 2)) == ENDPOINT
    await lead
    assert await other == ENDPOINT


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"{}\n",
        b"\xff" * 40_000,
        json.dumps({"shard": {"replica": "m-0", "generation": 6, "rank": 1}}).encode() + b"\n",
        json.dumps({"shard": {"replica": "other-0", "generation": 7, "rank": 1}}).encode() + b"\n",
        json.dumps({"shard": {"replica": "m-0", "generation": 7, "rank": 0}}).encode() + b"\n",
        json.dumps({"shard": {"replica": "m-0", "generation": 7, "rank": 3}}).encode() + b"\n",
    ],
)
async def test_who_does_not_belong_there_is_sent_away(port: int, line: bytes) -> None:
    lead = asyncio.create_task(gather(meeting(port, 0), ENDPOINT))
    await until(lambda: not port_is_free("127.0.0.1", port))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line)
    await asyncio.wait_for(_closed(reader), 8)
    writer.close()
    assert not lead.done()
    assert set(await asyncio.gather(come(meeting(port, 1)), come(meeting(port, 2)))) == {ENDPOINT}
    await lead


async def _closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1000):
            pass
    except ConnectionError:
        pass


async def test_an_older_generation_is_told_so(port: int) -> None:
    lead = asyncio.create_task(gather(meeting(port, 0), ENDPOINT))
    reason, detail = await failure(asyncio.create_task(come(meeting(port, 1, within_s=0.5, generation=6))))
    assert (reason, detail.partition(" s: ")[2]) == (Reason.RENDEZVOUS, "generation 7 of m-0 meets here")
    lead.cancel()
    await asyncio.wait([lead])
    assert port_is_free("127.0.0.1", port)


async def test_an_engine_that_answers_there_already_is_no_agent(port: int) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(say, "127.0.0.1", port):
        _, detail = await failure(asyncio.create_task(come(meeting(port, 1, within_s=0.3))))
    assert detail.endswith("somebody else answers there")


# -- ports and interfaces ---------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_passed_over_and_told(tmp_path: Path, port: int) -> None:
    config = AgentConfig(node="n1", data=tmp_path, ports=(port, port + 3))
    ledger = Ledger(tmp_path / "ledger.json")
    shard = ShardRef(replica="m-0", generation=1)
    with socket.create_server(("127.0.0.1", port)):
        chosen = choose_port(config, ledger)
        assert (chosen.port, chosen.taken) == (port + 1, (port,))
        ledger.meet(shard, chosen.port)
        assert choose_port(config, ledger, avoid=(port + 2,)) == (port + 3, (port + 2,))
        with pytest.raises(StepError, match=f"no port of {port} to {port + 3} is free"):
            choose_port(config, ledger, avoid=(port + 2, port + 3))


def test_looks_at_a_port_do_not_disturb_each_other(port: int) -> None:
    """As those of several nodes on one machine, and as an engine's own."""
    with ThreadPoolExecutor(4) as threads:
        looks = list(threads.map(lambda _: port_is_free("127.0.0.1", port), range(8000)))
    assert looks.count(False) == 0
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)
        assert not port_is_free("0.0.0.0", port)
    with socket.create_server(("0.0.0.0", port)):
        assert not port_is_free("127.0.0.1", port)
    with socket.socket() as bound:  # about to listen, and shares with nobody
        bound.bind(("127.0.0.1", port))
        assert not port_is_free("127.0.0.1", port)


def test_a_kept_port_is_nobody_elses_until_the_shard_ends(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    one, two = ShardRef(replica="m-0", generation=1), ShardRef(replica="m-0", generation=2)
    entry = Entry(shard=two, model="m", engine=Engine.VLLM, port=10, endpoint="", stem="")
    ledger.meet(one, 11)
    assert (ledger.meeting(one), ledger.meeting(two)) == (11, None)
    assert ledger.next_port(10, 13) == [10, 12, 13]
    ledger.meet(two, 12)
    ledger.give_back(one)
    assert Ledger(tmp_path / "ledger.json").meeting(two) == 12, "an older generation's end takes nothing away"
    ledger.put(entry)
    ledger.give_back_unused()
    assert ledger.meeting(two) == 12
    ledger.drop(entry)
    assert ledger.meeting(two) is None
    ledger.meet(two, 12)
    ledger.give_back_unused()
    assert ledger.next_port(10, 13) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("127.3.2.1", "lo"), ("192.0.2.77", ""), ("no such host.invalid", "")],
)
def test_the_interface_of_an_address(address: str, name: str) -> None:
    assert interface_of(address) == name

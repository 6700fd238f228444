"""`up` and `down` with a real Temporal dev server and toy parts (tests/toy_system)."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cli import embedded
from cli.embedded import AskedPorts, down, running, up
from cli.errors import CtlError
from cli.home import Home, SystemRecord
from cli.parts import STOP_ORDER
from cli.ports import PortTakenError
from cli.processes import start_ticks
from runtime.config import ConfigError
from tests.system import free_ports
from tests.waiting import until

TOYS = Path(__file__).parent / "toy_system"


def asked() -> AskedPorts:
    first = free_ports(3)
    return AskedPorts(first, first + 1, first + 2)


def quiet(text: str) -> None:
    assert text


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    made = Home(tmp_path / "a home", code=TOYS)
    yield made
    await down(made, quiet)


async def test_a_system_from_start_to_end(home: Home) -> None:
    said: list[str] = []
    ports = asked()
    started = await up(home, ports, said.append)
    assert set(started.parts) == set(STOP_ORDER)
    assert (started.system.port, started.system.ui_port, started.system.gateway_port) == (
        ports.port,
        ports.ui_port,
        ports.gateway_port,
    )
    assert said[0] == f"Temporal at 127.0.0.1:{ports.port}, web UI at http://127.0.0.1:{ports.ui_port}"
    assert home.system() == started.system
    before = running(home)
    assert set(before) == set(STOP_ORDER)
    engine = int((home.agent().data / "engine.pid").read_text())

    # A second `up` changes nothing, and keeps a setting that was edited.
    home.agent_yaml.write_text(home.agent_yaml.read_text() + "labels: {rack: a}\n")
    assert (await up(home, AskedPorts(), quiet)).parts == ()
    assert running(home) == before
    assert home.agent().labels == {"rack": "a"}

    # Other ports than those it runs on are refused.
    with pytest.raises(CtlError, match="the system runs already, with --port"):
        await up(home, asked(), quiet)

    # What died is started again, alone and on the same ports.
    os.kill(before["gateway"].pid, signal.SIGKILL)
    await until(lambda: not before["gateway"].alive)
    again = await up(home, AskedPorts(), quiet)
    assert again.parts == ("gateway",)
    assert again.system == started.system
    assert {name: record for name, record in running(home).items() if name != "gateway"} == {
        name: record for name, record in before.items() if name != "gateway"
    }

    # The agent is killed: its engine lives on, and `down` still leaves nothing.
    os.kill(before["agent"].pid, signal.SIGKILL)
    await until(lambda: not before["agent"].alive)
    assert start_ticks(engine) is not None
    said.clear()
    assert await down(home, said.append) == ("gateway", "worker", "temporal")
    assert said[-1] == "ended 1 process left by a part that had been killed"
    assert start_ticks(engine) is None
    assert running(home) == {}
    assert home.system() is None
    assert await down(home, quiet) == ()

    # The fleet knows the node of before, and the next `up` waits for the new agent.
    assert set((await up(home, asked(), quiet)).parts) == set(STOP_ORDER)


def test_a_new_home_has_secrets_that_its_parts_share(home: Home) -> None:
    home.prepare()
    server, agent = home.server(), home.agent()
    for ours, theirs in (
        (server.engine_key_file, agent.engine_key_file),
        (server.weights_token_file, agent.weights.token_file),
    ):
        assert ours is not None
        assert ours == theirs
        assert ours.stat().st_mode & 0o777 == 0o600
        assert len(ours.read_text(encoding="ascii").strip()) == 64
    assert home.engine_key.read_text() != home.weights_token.read_text()


async def test_a_part_that_dies_at_its_start_takes_the_rest_down_again(home: Home) -> None:
    home.prepare()
    (home.path / "agent.dies").touch()
    with pytest.raises(CtlError) as caught:
        await up(home, asked(), quiet)
    assert str(caught.value) == (
        "agent ended at its start; its log ends with:\n  agent: no disk to keep the ledger on\n"
        f"(all of it: {home.log('agent')})"
    )
    assert running(home) == {}


async def test_a_part_that_dies_while_another_is_waited_for_is_noticed_at_once(home: Home) -> None:
    home.prepare()
    (home.path / "worker.dies").touch()
    (home.path / "agent.hangs").touch()
    with pytest.raises(
        CtlError, match=r"worker ended at its start; its log ends with:\n(.*\n)*  worker: lost its mind"
    ):
        await up(home, asked(), quiet)
    assert running(home) == {}


async def test_an_interrupted_up_leaves_nothing_running(home: Home) -> None:
    home.prepare()
    (home.path / "agent.hangs").touch()
    starting = asyncio.create_task(up(home, asked(), quiet))
    await until(lambda: "agent" in running(home), timeout=60)
    records = running(home)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [name for name, record in records.items() if record.alive] == []


async def test_a_port_somebody_holds_is_an_error_where_it_was_asked_for(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} for Temporal is taken by .*pid {os.getpid()}"):
            await up(home, AskedPorts(port=port), quiet)
    assert running(home) == {}


async def test_a_port_that_is_taken_after_it_was_chosen_is_exchanged(home: Home) -> None:
    said: list[str] = []
    with contextlib.ExitStack() as stack:

        def take(text: str) -> None:
            """Once Temporal runs, and before the gateway starts."""
            said.append(text)
            chosen = home.system()
            if text.startswith("Temporal at") and chosen is not None and len(held) == 0:
                held.append(chosen.gateway_port)
                stack.enter_context(socket.create_server(("127.0.0.1", chosen.gateway_port)))

        held: list[int] = []
        ports = asked()
        started = await up(home, AskedPorts(ports.port, ports.ui_port), take)
    assert held
    assert started.system.gateway_port not in held
    assert set(started.parts) == set(STOP_ORDER)
    (again,) = (text for text in said if text.endswith("meanwhile: starting again"))
    assert again.startswith(f"port {held[0]} was taken by ")
    assert set(running(home)) == set(STOP_ORDER)


async def test_another_systems_temporal_is_not_taken_for_ours(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two `up` at once chose the same port: the one that came second would have had its worker at the other's."""
    theirs = await up(home, asked(), quiet)
    ours, said = Home(tmp_path / "another home", code=TOYS), list[str]()
    choose, turns = embedded._ports, list[SystemRecord]()

    def as_both_did(chosen_for: Home, *others: Any) -> SystemRecord:
        chosen = choose(chosen_for, *others)
        turns.append(chosen)
        return chosen if len(turns) > 1 else chosen.model_copy(update={"port": theirs.system.port})

    monkeypatch.setattr(embedded, "_ports", as_both_did)
    try:
        started = await up(ours, AskedPorts(), said.append)
        assert started.system.port != theirs.system.port
        assert len([text for text in said if text.endswith("meanwhile: starting again")]) == len(turns) - 1 == 1
        assert f"Temporal at {theirs.system.address}" not in "\n".join(said)
    finally:
        await down(ours, quiet)


async def test_a_port_that_was_asked_for_and_is_taken_meanwhile_is_an_error(home: Home) -> None:
    with contextlib.ExitStack() as stack:
        ports = asked()

        def take(text: str) -> None:
            if text.startswith("Temporal at"):
                stack.enter_context(socket.create_server(("127.0.0.1", ports.gateway_port or 0)))

        with pytest.raises(PortTakenError, match=f"port {ports.gateway_port} for the gateway is taken by"):
            await up(home, ports, take)
    assert running(home) == {}


async def test_a_wrong_setting_is_an_answer_before_anything_starts(home: Home) -> None:
    home.prepare()
    home.agent_yaml.write_text("data: node\nnod: x\n")
    with pytest.raises(ConfigError, match=r"agent\.yaml:2: nod: unknown key"):
        await up(home, asked(), quiet)
    assert running(home) == {}


async def test_down_before_any_up_says_nothing_ran(tmp_path: Path) -> None:
    assert await down(Home(tmp_path / "none"), quiet) == ()
    assert not (tmp_path / "none").exists()

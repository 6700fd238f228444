import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cli.processes import ProcessRecord, holder_of, listens, spawn, start_ticks, stop, sweep
from tests.waiting import until

WAIT = "import signal; signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
# Goes at once, and leaves a child in a session of its own.
LEAVES_A_CHILD = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAIT!r}], start_new_session=True)
print(child.pid, flush=True)
signal.pause()
"""


class Nursery:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[ProcessRecord] = []

    def spawn(self, code: str, **environment: str) -> ProcessRecord:
        record = spawn(
            "toy",
            [sys.executable, "-c", code],
            log=self.path / "toy.log",
            cwd=self.path,
            environment={"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", **environment},
        )
        self.records.append(record)
        return record


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    for record in made.records:
        if record.alive:
            os.kill(record.pid, signal.SIGKILL)


LISTENS = """
import signal, socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
signal.pause()
"""


async def test_who_listens_is_told_from_who_merely_answers_there(nursery: Nursery) -> None:
    record = nursery.spawn(LISTENS)
    port = int(await until(lambda: record.log.read_text().strip(), 20.0))
    assert listens(record, port)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert not listens(record, ours.getsockname()[1])
    assert await stop(record, 10.0)
    assert not listens(record, port)


async def test_a_process_runs_in_its_own_session_and_ends_on_term(nursery: Nursery) -> None:
    record = nursery.spawn(WAIT)
    assert record.alive
    assert os.getsid(record.pid) == record.pid
    assert await stop(record, 10.0) is True
    assert not record.alive
    assert await stop(record, 10.0) is False


async def test_one_that_does_not_hear_term_is_killed(nursery: Nursery) -> None:
    record = nursery.spawn(DEAF)
    await until(lambda: record.last_lines() == ["deaf"])
    assert await stop(record, 0.1) is True
    assert not record.alive


async def test_what_a_process_leaves_behind_is_ended_with_it(nursery: Nursery) -> None:
    record = nursery.spawn(LEAVES_A_CHILD)
    [child] = await until(record.last_lines)
    assert start_ticks(int(child)) is not None
    await stop(record, 10.0)
    assert start_ticks(int(child)) is None


async def test_a_pid_that_was_given_to_another_process_is_left_alone(nursery: Nursery) -> None:
    record = nursery.spawn(WAIT)
    impostor = record.model_copy(update={"ticks": record.ticks - 1})
    assert not impostor.alive
    assert await stop(impostor, 0.1) is False
    assert record.alive


def test_a_record_of_an_earlier_boot_is_dead(nursery: Nursery) -> None:
    record = nursery.spawn(WAIT)
    assert not record.model_copy(update={"boot": "another"}).alive


async def test_the_log_shows_only_this_start(nursery: Nursery) -> None:
    first = nursery.spawn("print('first')")
    await until(lambda: not first.alive)
    second = nursery.spawn("print('second'); print(); raise SystemExit('no disk')")
    await until(lambda: not second.alive)
    assert second.last_lines() == ["second", "no disk"]
    assert second.last_lines(1) == ["no disk"]


async def test_a_process_that_cannot_be_started_says_which() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        spawn("toy", ["/no/such/binary"], log=Path(os.devnull), cwd=Path("/"), environment={})
    assert caught.value.filename == "/no/such/binary"


async def test_sweep_ends_what_carries_the_mark_and_nothing_else(nursery: Nursery) -> None:
    marked = nursery.spawn(DEAF, TOY_MARK=str(nursery.path))
    other = nursery.spawn(WAIT, TOY_MARK="elsewhere")
    await until(marked.last_lines)
    assert await sweep(lambda environ: environ.get("TOY_MARK") == str(nursery.path), 0.1) == 1
    assert not marked.alive
    assert other.alive


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert holder_of(port) == f"{psutil.Process().name()} (pid {os.getpid()})"
    assert holder_of(port) == ""


def test_a_process_name_with_spaces_and_parentheses_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a (b) c"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        try:
            assert start_ticks(process.pid) is not None
        finally:
            process.kill()

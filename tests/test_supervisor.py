"""Engine processes for real: started, found, ended with everything they started, and how they ended."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from activities.node_contract import ShardRef
from agent.engines.adapter import ExitStatus
from agent.layout import Layout
from agent.processes import alive, boot_id, mark, stat
from agent.supervisor import EngineProcess, Supervisor, engine_environment
from tests.fake_engines.node import PROGRAM
from tests.system import free_ports
from tests.waiting import until

SHARD = ShardRef(replica="tiny-0", generation=3)
PYTHON = [sys.executable, "-c"]


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    made = Supervisor(Layout(tmp_path))
    yield made
    for stem in made.running_launches():
        found = made.find(stem)
        if found is not None:
            await made.stop(found, 0)


async def launch(supervisor: Supervisor, *command: str) -> EngineProcess:
    return await supervisor.launch(supervisor.next_stem(SHARD), command, {})


async def fake(supervisor: Supervisor, *knobs: str) -> EngineProcess:
    return await launch(supervisor, sys.executable, str(PROGRAM), "127.0.0.1", str(free_ports(1)), *knobs)


async def test_the_engine_runs_in_its_own_session_with_its_output_in_the_log(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    script = "import sys, signal; print('out'); print('err', file=sys.stderr); sys.stdout.flush(); signal.pause()"
    process = await launch(supervisor, *PYTHON, script)
    assert process.stem == str(tmp_path / "logs" / "tiny-0.0" / "3-1")
    await until(lambda: "out" in supervisor.tail(process.stem) and "err" in supervisor.tail(process.stem))
    assert (tmp_path / "logs" / "tiny-0.0" / "latest").resolve().name == "3-1.log"
    status = stat(process.engine.pid)
    assert status is not None
    assert status.session == process.shim.pid != os.getsid(0)
    assert status.parent == process.shim.pid
    assert str(Path(f"/proc/{process.engine.pid}/fd/0").readlink()) == os.devnull
    # Where no module of ours lies that `python -m` could import.
    assert Path(f"/proc/{process.engine.pid}/cwd").readlink() == tmp_path / "logs" / "tiny-0.0"
    assert supervisor.ended(process) is None
    assert supervisor.runs(process)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("pass", ExitStatus(code=0)),
        ("raise SystemExit(3)", ExitStatus(code=3)),
        ("import os; os.kill(os.getpid(), 9)", ExitStatus(signal=9)),
        ("import os; os.abort()", ExitStatus(signal=6)),
    ],
)
async def test_how_an_engine_ended_is_known(supervisor: Supervisor, script: str, status: ExitStatus) -> None:
    process = await launch(supervisor, *PYTHON, script)
    found = await until(lambda: supervisor.ended(process))
    assert found == status
    assert not supervisor.runs(process)


async def test_a_command_that_cannot_be_run_is_an_exit_with_its_reason(supervisor: Supervisor) -> None:
    process = await launch(supervisor, "/no/such/program")
    assert await until(lambda: supervisor.ended(process)) == ExitStatus(code=127)
    assert "/no/such/program cannot be started: No such file" in supervisor.tail(process.stem)


async def test_how_it_ended_is_known_to_a_later_agent_too(supervisor: Supervisor, tmp_path: Path) -> None:
    process = await launch(supervisor, *PYTHON, "import signal; signal.pause()")
    os.kill(process.engine.pid, signal.SIGKILL)
    later = Supervisor(Layout(tmp_path))
    found = later.find(process.stem)
    assert found == process
    assert await until(lambda: later.ended(process)) == ExitStatus(signal=9)
    assert ExitStatus(signal=9).sentence == "killed by signal 9"


async def test_term_is_enough_for_one_that_obeys(supervisor: Supervisor) -> None:
    process = await fake(supervisor)
    assert await supervisor.stop(process, 10) is False
    assert not supervisor.members(process)
    assert supervisor.ended(process) == ExitStatus(signal=signal.SIGTERM)
    assert stat(process.shim.pid) is None, "no zombie is left"
    assert await supervisor.stop(process, 10) is False


async def test_one_that_ignores_term_is_killed_after_the_grace(supervisor: Supervisor) -> None:
    process = await fake(supervisor, "deaf=1", "line=deaf")
    await until(lambda: "deaf" in supervisor.tail(process.stem) and _ignores_term(process.engine.pid))
    assert await supervisor.stop(process, 0.2) is True
    assert not supervisor.members(process)
    assert not alive(process.engine, boot_id())


def _ignores_term(pid: int) -> bool:
    text = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in text.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored.split()[1], 16) & 1 << signal.SIGTERM - 1)


async def test_a_descendant_that_left_session_and_parent_ends_too(supervisor: Supervisor, tmp_path: Path) -> None:
    process = await fake(supervisor, f"loner={tmp_path}/loner")
    pid = await until(lambda: _number(tmp_path / "loner"))
    loner = mark(pid)
    assert loner is not None
    assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
    assert os.getsid(pid) != process.shim.pid
    assert loner in supervisor.members(process)
    await supervisor.stop(process, 5)
    assert not alive(loner, boot_id())


async def test_what_a_killed_engine_leaves_ends_without_any_agent(supervisor: Supervisor, tmp_path: Path) -> None:
    process = await fake(supervisor, f"loner={tmp_path}/loner")
    loner = mark(await until(lambda: _number(tmp_path / "loner")))
    assert loner is not None
    os.kill(process.engine.pid, signal.SIGKILL)
    await until(lambda: not alive(loner, boot_id()))
    assert await until(lambda: supervisor.ended(process)) == ExitStatus(signal=9)


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


async def test_a_killed_shim_takes_its_engine_along(supervisor: Supervisor, tmp_path: Path) -> None:
    process = await fake(supervisor, f"loner={tmp_path}/loner")
    loner = mark(await until(lambda: _number(tmp_path / "loner")))
    assert loner is not None
    os.kill(process.shim.pid, signal.SIGKILL)
    status = await until(lambda: supervisor.ended(process))
    assert status.note == "its shim was killed"
    await until(lambda: not alive(process.engine, boot_id()))
    await supervisor.stop(process, 0)
    assert not alive(loner, boot_id())


async def test_a_pid_of_another_process_is_never_hit(supervisor: Supervisor) -> None:
    process = await fake(supervisor)
    wrong = process.engine.model_copy(update={"start_ticks": process.engine.start_ticks + 1})
    other = EngineProcess(stem=f"{process.stem}-other", shim=wrong, engine=wrong)
    await supervisor.stop(other, 5)
    old_boot = process.engine.model_copy(update={"boot_id": "another boot"})
    gone = EngineProcess(stem=f"{process.stem}-old", shim=old_boot, engine=old_boot)
    await supervisor.stop(gone, 5)
    assert supervisor.ended(gone) == ExitStatus(note="the machine was restarted")
    assert supervisor.runs(process)


async def test_a_launch_before_a_restart_of_the_machine_is_not_found(supervisor: Supervisor) -> None:
    process = await fake(supervisor)
    file = Path(f"{process.stem}.pid")
    said = json.loads(file.read_text())
    assert said["boot_id"] == boot_id()
    file.write_text(json.dumps({**said, "boot_id": "an earlier boot"}))
    assert supervisor.find(process.stem) is None, "its pids may be those of others now"
    file.write_text(json.dumps({name: value for name, value in said.items() if name != "boot_id"}))
    assert supervisor.find(process.stem) == process, "as a shim wrote it that knew of no boots"


async def test_running_launches_are_found_without_a_ledger(supervisor: Supervisor, tmp_path: Path) -> None:
    stem = supervisor.next_stem(SHARD)
    process = await supervisor.launch(stem, [*PYTHON, "import signal; signal.pause()"], {}, note='{"a": 1}')
    later = Supervisor(Layout(tmp_path))
    assert later.running_launches() == {stem: '{"a": 1}'}
    assert Supervisor(Layout(tmp_path / "elsewhere")).running_launches() == {}
    assert later.find(stem) == process


async def test_each_launch_has_a_log_of_its_own_and_old_ones_go(supervisor: Supervisor, tmp_path: Path) -> None:
    names = []
    for _ in range(12):
        process = await launch(supervisor, *PYTHON, "pass")
        await until(partial(supervisor.ended, process))
        names.append(Path(process.stem).name)
    assert names == [f"3-{number}" for number in range(1, 13)]
    left = sorted(path.name for path in (tmp_path / "logs" / "tiny-0.0").glob("*.log"))
    assert left == sorted(f"3-{number}.log" for number in range(3, 13))


def test_an_engine_gets_no_secret_and_none_of_our_settings() -> None:
    environ = {
        "PATH": "/bin",
        "HOME": "/home/x",
        "LC_ALL": "C",
        "CUDA_HOME": "/cuda",
        "OMP_NUM_THREADS": "2",
        "VLLM_API_KEY": "k",
        "HF_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "s",
        "OTEL_EXPORTER_OTLP_HEADERS": "h",
        "TEMPORAL_ADDRESS": "a",
        "HTTPS_PROXY": "http://user:pass@proxy",
        "PYTHONPATH": "/repo",
    }
    assert engine_environment(environ) == {
        "PATH": "/bin",
        "HOME": "/home/x",
        "LC_ALL": "C",
        "CUDA_HOME": "/cuda",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


async def test_the_agents_secrets_are_not_in_the_engines_environment(supervisor: Supervisor) -> None:
    process = await launch(supervisor, *PYTHON, "import signal; signal.pause()")
    environ = psutil.Process(process.engine.pid).environ()
    assert set(environ) & set(os.environ) <= engine_environment(os.environ).keys() | {"PYTHONUNBUFFERED"}
    assert environ["LLMGW_RUN"] == process.stem

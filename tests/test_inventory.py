"""What a node has: the arithmetic of foreign memory as a table, the measurement against the machine itself."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from activities.node_contract import ShardRef
from agent.engines import ADAPTERS
from agent.install import Installs
from agent.inventory import foreign, held, measure, notable, reserved
from agent.ledger import Entry
from agent.machine import Machine, ThisMachine, WrittenMachine
from agent.processes import Mark, own_memory
from agent.supervisor import EngineProcess
from agent.weights import WeightStore
from fleet.reasons import Failure, Reason
from fleet.spec import Engine
from fleet.state import CPU, Device, DeviceShare, EngineOffer, Inventory
from runtime.config import AgentConfig, ConfigError, EngineConfig

GIB = 1024**3
MIB = 1024**2


@pytest.mark.parametrize(
    ("budget", "ours", "available", "others"),
    [
        (16, 0, 12, 4),  # all RAM is the budget: what others use
        (16, 3, 9, 4),
        (8, 0, 12, 0),  # a smaller budget is whole while it fits
        (8, 8, 4, 0),
        (8, 0, 5, 3),
        (8, 2, 5, 1),
        (8, 20, 0, 0),  # our engines took more than was meant
        (64, 0, 12, 52),  # a budget beyond the machine
        (8, 0, -5, 8),
    ],
)
def test_foreign(budget: int, ours: int, available: int, others: int) -> None:
    assert foreign(budget, ours, available) == others


def node(tmp_path: Path, machine: Machine | None = None, **settings: object) -> Inventory:
    engines = {Engine.LLAMACPP: EngineConfig(bin=Path(sys.executable)), Engine.SGLANG: EngineConfig()}
    config = AgentConfig.model_validate({"node": "n1", "data": tmp_path, "engines": engines, **settings})
    installs = Installs(tmp_path / "engines", config.engines, ADAPTERS)
    weights = WeightStore(tmp_path / "weights", 0)
    return measure(config, machine or ThisMachine(), installs, weights, (), {}, tmp_path / "weights")


def test_this_machine(tmp_path: Path) -> None:
    found = node(tmp_path, address="10.0.0.7", labels={"zone": "a"}, roles=("mirror",), keep_free=MIB)
    total, available = ThisMachine().ram()
    cpu = found.devices[0]
    assert (cpu.uuid, cpu.total) == (CPU, total)
    assert total <= psutil.virtual_memory().total
    assert cpu.usable == pytest.approx(available, abs=GIB)
    assert found.engines == (EngineOffer(engine=Engine.LLAMACPP, version="local", installed=True),)
    assert found.cpus == len(os.sched_getaffinity(0))
    assert 0 <= found.disk_free < found.disk_total
    assert (found.address, found.labels, found.roles, found.weights) == ("10.0.0.7", {"zone": "a"}, ("mirror",), ())


def test_memory_in_the_configuration_is_the_budget(tmp_path: Path) -> None:
    cpu = node(tmp_path, memory="100MiB").devices[0]
    assert (cpu.total, cpu.foreign) == (100 * MIB, 0)


def test_own_memory_counts_what_a_process_holds() -> None:
    # A process of its own: this one may take new memory from what earlier tests gave back.
    code = f"import os; block = os.urandom({64 * MIB}); print(len(block), flush=True); input()"
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == 64 * MIB
        assert 64 * MIB < own_memory(child.pid) < 128 * MIB
        child.kill()
    assert own_memory(2**22 + 1) == 0


WRITTEN = """\
memory: 64GiB
memory_used: 4GiB
cpus: 32
disk: 1TiB
disk_used: 24GiB
gpus:
  - uuid: GPU-a
    model: NVIDIA H100 80GB HBM3
    total: 80GiB
    processes:
      - {pid: 41, memory: 1GiB}
      - {pid: 42, memory: 3GiB}
  - {uuid: GPU-b, total: 80GiB}
"""


def test_a_file_stands_for_the_machine_and_is_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(WRITTEN)
    machine = WrittenMachine(path)
    found = node(tmp_path, machine, keep_free=GIB)
    assert [(one.uuid, one.total, one.foreign, one.holders) for one in found.devices] == [
        (CPU, 64 * GIB, 4 * GIB, ()),
        ("GPU-a", 80 * GIB, 4 * GIB, (42, 41)),
        ("GPU-b", 80 * GIB, 0, ()),
    ]
    assert (found.cpus, found.disk_total, found.disk_free) == (32, 1024 * GIB, 999 * GIB)
    assert held(machine.gpus, {"GPU-a", "GPU-b", "GPU-c"}) == {"GPU-a": ((42, 3 * GIB), (41, GIB))}
    assert held(machine.gpus, {"GPU-b"}) == {}
    path.write_text("gpus: []\n")
    assert [one.uuid for one in node(tmp_path, machine).devices] == [CPU]
    path.write_text("gpus: 7\n")
    assert [one.uuid for one in node(tmp_path, machine).devices] == [CPU]
    assert [record.message for record in caplog.records] == [
        f"{path}:1: gpus: Input should be a valid tuple; what it said before stays"
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpus:\n  - {uuid: a, total: 1GiB}\n  - {uuid: b}\n", ":3: gpus.1.total: Field required"),
        ("gpus:\n  - {uuid: a, total: 1GiB}\n  - {uuid: a, total: 1GiB}\n", "two GPUs have the uuid a"),
        ("gpus:\n  - {uuid: cpu, total: 1GiB}\n", "the uuid cpu stands for the RAM: give the GPU another"),
        ("cpus: 1\ngpu: []\n", ":2: gpu: unknown key; remove it or correct its name"),
        ("gpus:\n - {uuid: a, total: 1, processes: [{pid: 0, memory: 1}]}\n", ":2: gpus.0.processes.0.pid: "),
        ("memory: [\n", ":2: not YAML"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        WrittenMachine(path)
    assert str(caught.value).startswith(str(path))
    assert complaint in str(caught.value)


def test_an_agent_with_a_bad_file_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text("data: node\ninventory_file: machine.yaml\n")
    (tmp_path / "machine.yaml").write_text("gpus:\n- {uuid: a}\n")
    command = [sys.executable, "-m", "agent", "--config", str(tmp_path / "agent.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"agent: {tmp_path}/machine.yaml:2: gpus.0.total: Field required\n"
    assert not (tmp_path / "node").exists()


def test_what_is_reserved_counts_what_runs() -> None:
    mark = Mark(pid=1, start_ticks=1, boot_id="b")
    entry = Entry(
        shard=ShardRef(replica="a-0", generation=1),
        model="a",
        engine=Engine.VLLM,
        devices=(DeviceShare(uuid="GPU-a", memory=3), DeviceShare(uuid="GPU-b", memory=3)),
        port=1,
        endpoint="",
        stem="",
        process=EngineProcess(stem="", engine=mark, shim=mark),
    )
    other = entry.model_copy(update={"devices": (DeviceShare(uuid="GPU-b", memory=4),)})
    ended = other.model_copy(update={"failure": Failure(reason=Reason.EXITED, detail="x")})
    unborn = other.model_copy(update={"process": None})
    assert reserved((entry, other, ended, unborn)) == {"GPU-a": 3, "GPU-b": 7}


BASE = Inventory(
    address="a", devices=(Device(uuid=CPU, total=100, foreign=10),), disk_total=1000, disk_free=500, weights=("x",)
)


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({}, False),
        ({"disk_free": 455}, False),
        ({"disk_free": 440}, True),
        ({"devices": (Device(uuid=CPU, total=100, foreign=15),)}, False),
        ({"devices": (Device(uuid=CPU, total=100, foreign=16),)}, True),
        ({"devices": (Device(uuid=CPU, total=90, foreign=10),)}, True),
        ({"devices": ()}, True),
        ({"weights": ("x", "y")}, True),
        ({"engines": (EngineOffer(engine=Engine.VLLM, version="1", installed=False),)}, True),
    ],
)
def test_what_matters_to_placement(change: dict[str, object], matters: bool) -> None:
    assert notable(BASE, BASE.model_copy(update=change)) is matters

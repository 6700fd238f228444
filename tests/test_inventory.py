"""What a node has: the arithmetic of foreign memory as a table, the measurement against the machine itself."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agent.engines import ADAPTERS
from agent.install import Installs
from agent.inventory import foreign, gpus, measure, notable, ram
from agent.processes import own_memory
from agent.weights import WeightStore
from fleet.spec import Engine
from fleet.state import CPU, Device, EngineOffer, Inventory
from runtime.config import AgentConfig, EngineConfig

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


def node(tmp_path: Path, **settings: object) -> Inventory:
    engines = {Engine.LLAMACPP: EngineConfig(bin=Path(sys.executable)), Engine.SGLANG: EngineConfig()}
    config = AgentConfig.model_validate({"node": "n1", "data": tmp_path, "engines": engines, **settings})
    installs = Installs(tmp_path / "engines", config.engines, ADAPTERS)
    return measure(config, installs, WeightStore(tmp_path / "weights", 0), (), tmp_path / "weights")


def test_this_machine(tmp_path: Path) -> None:
    found = node(tmp_path, address="10.0.0.7", labels={"zone": "a"}, roles=("mirror",), keep_free=MIB)
    total, available = ram()
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


def test_a_machine_without_a_gpu_says_so() -> None:
    assert all(device.uuid.startswith("GPU") for device in gpus(()))


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

"""The GPUs an engine gets, and how much of each: the flags of each engine, as tables."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agent.engines import ADAPTERS
from agent.engines.adapter import Launch, fraction
from agent.engines.llamacpp import LAUNCHER
from agent.engines.sglang import static_memory
from fleet.devices import most_gpus, suiting
from fleet.fit import FitVerdict, judge
from fleet.placement import place
from fleet.room import room_of
from fleet.spec import Engine
from fleet.state import CPU, Device
from tests.fleets import fleet, inventory, spec
from tests.real_engine import ENGINE
from tests.test_engines import LAUNCH

GIB = 1024**3
ON_ONE = replace(LAUNCH, entry="", gpus=("GPU-1",), gpu_total=80 * GIB, gpu_free=80 * GIB, args=())
WHOLE = replace(ON_ONE, memory=80 * GIB)


def flag(engine: Engine, launch: Launch, name: str) -> str:
    command = ADAPTERS[engine].command(Path("python"), launch)
    return command[command.index(name) + 1]


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [(8, 80, "0.1000"), (2, 3, "0.6666"), (80, 80, "0.9999"), (100, 80, "0.9999"), (0, 80, "0.0001"), (1, 0, "0.9999")],
)
def test_a_share_is_rounded_down_and_never_all_or_nothing(part: int, whole: int, said: str) -> None:
    assert fraction(part, whole) == said


@pytest.mark.parametrize(
    ("launch", "vllm", "sglang"),
    [
        (WHOLE, "0.9999", "0.9793"),
        (replace(ON_ONE, memory=40 * GIB), "0.5000", "0.4793"),
        # others hold half of it: vLLM counts in all the GPU has, SGLang in what is free as it starts
        (replace(ON_ONE, memory=40 * GIB, gpu_free=40 * GIB), "0.5000", "0.9587"),
        (replace(ON_ONE, memory=2 * GIB), "0.0250", "0.0125"),
    ],
)
def test_a_part_of_a_gpu(launch: Launch, vllm: str, sglang: str) -> None:
    assert flag(Engine.VLLM, launch, "--gpu-memory-utilization") == vllm
    assert flag(Engine.SGLANG, launch, "--mem-fraction-static") == sglang
    assert static_memory(launch) < launch.memory
    for engine in Engine:
        assert ADAPTERS[engine].environment(launch)["CUDA_VISIBLE_DEVICES"] == "GPU-1"


@pytest.mark.parametrize("engine", list(Engine))
def test_no_gpu_is_seen_from_the_cpu(engine: Engine) -> None:
    command = ADAPTERS[engine].command(Path("python"), LAUNCH)
    assert ADAPTERS[engine].environment(LAUNCH)["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"--gpu-memory-utilization", "--mem-fraction-static"} & set(command)


@pytest.mark.parametrize(
    ("gpus", "extra", "layers", "split"),
    [
        (0, [], 0, []),
        (1, [], 9999, []),
        (3, [], 9999, [1.0, 1.0, 1.0]),
        (1, ["n_gpu_layers=7"], 7, []),
    ],
)
def test_llamacpp_takes_all_layers_in_equal_parts(
    real_engine: None, gpus: int, extra: list[str], layers: int, split: list[float]
) -> None:
    code = (
        "import json, sys, xllamacpp, llamacpp_launcher as launcher; params = xllamacpp.CommonParams(); "
        f"launcher.bind(params, {gpus}); launcher.apply(params, {extra}); "
        "print(json.dumps([params.n_gpu_layers, [part for part in params.tensor_split if part]]))"
    )
    environment = {"PYTHONPATH": str(LAUNCHER.parent)}
    said = subprocess.run([os.environ[ENGINE], "-c", code], env=environment, capture_output=True, check=True).stdout
    assert json.loads(said) == [layers, split]


def test_slices_are_taken_one_by_one() -> None:
    slices = tuple(Device(uuid=f"MIG-{name}", model="H100 MIG 1g.10gb", total=10 * GIB) for name in "ab")
    whole = Device(uuid="GPU-1", model="H100", total=80 * GIB)
    node = inventory(devices=(Device(uuid=CPU, total=GIB), *slices, whole))
    for gpus, fits in ((1, True), (2, False)):
        wanted = spec("m", gpus=gpus, memory=8 * GIB)
        decision = place(wanted, "m-0", room_of(fleet({"n1": node}, wanted)))
        assert bool(decision.shards) is fits
        # The check, the agent and the planner are of one mind.
        judged = judge(fleet({"n1": node}), "m", Engine.LLAMACPP, wanted.need)
        assert (judged.verdict is FitVerdict.FITS) is fits
        assert len(suiting(node.devices, gpus)) == {1: 3, 2: 1}[gpus]
    assert judged.sentence.endswith("the node with most whole GPUs, n1, has 1")
    assert most_gpus(node.devices) == most_gpus(slices) == 1
    assert most_gpus((*node.devices, whole.model_copy(update={"uuid": "GPU-2"}))) == 2
    assert most_gpus(node.devices[:1]) == 0

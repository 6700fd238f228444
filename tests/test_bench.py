"""The benches run, in a tiny size, and measure what they say: plans that place, preempt and evict; whole packings."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import packing, placement, tracing, transfer
from bench.fleets import GIB, Packing
from fleet.state import CPU, FleetState

TINY = ["--nodes", "16", "--gpus", "4", "--replicas", "12", "--models", "4", "--runs", "1"]


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_every_measure_of_the_planner_comes_out_as_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    placement.main([*TINY, "--json"])
    found = printed(capsys)
    assert found["size"] == {"nodes": 16, "gpus": 4, "replicas": 12, "models": 4}
    assert {one["name"]: one["outcome"] for one in found["measures"]} == {
        "one placement": "16 verdicts",
        "full plan on empty nodes": "12 scale up",
        "quiet plan": "quiet",
        "plan for one replica more": "1 scale up",
        "plan for one new model": "1 scale up",
        "plan that preempts": "1 preempt, 2 refused",
        "plan that evicts": "8 evict, 1 refused",
        "plan with 50 that wait": "50 refused",
    }
    assert all(one["seconds"] > 0 and one["loops"] > 0 for one in found["measures"])
    sizes = [(nodes, replicas) for nodes in (4, 8, 16) for replicas in (3, 6, 12)]
    assert [(one["nodes"], one["replicas"]) for one in found["growth"]] == sizes
    assert found["growth"][0]["ratio"] == 1.0


def test_the_table_names_each_measure_once(capsys: pytest.CaptureFixture[str]) -> None:
    placement.main(TINY)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 nodes x 4 GPUs, 12 replicas of 4 models"
    assert sum(line.startswith("plan that preempts ") for line in lines) == 1
    assert sum(line.startswith("16 nodes, 12 replicas ") for line in lines) == 1


@pytest.mark.parametrize("load", packing.LOADS)
def test_a_random_fleet_is_the_same_again_and_wants_its_load(load: float) -> None:
    state = packing.random_fleet(7, load, 3, 5)
    assert state == packing.random_fleet(7, load, 3, 5)
    assert 3 <= len(state.nodes) <= 5
    devices = [device for node in state.nodes.values() for device in node.inventory.devices]
    for on_cpu in (True, False):
        there = sum(device.total for device in devices if (device.uuid == CPU) is on_cpu)
        assert load * there <= wanted(state, on_cpu=on_cpu)


def wanted(state: FleetState, *, on_cpu: bool) -> int:
    specs = [model.spec for model in state.models.values() if (model.spec.need.gpus == 0) is on_cpu]
    return sum(one.need.memory * max(1, one.need.gpus) * one.shards * one.replicas for one in specs)


def test_a_comparison_holds_both_packings_and_their_ratios() -> None:
    one = packing.compare(7, 0.8, (3, 5), lambda _: Packing(memory=10_000, replicas=100, proven=True))
    state = packing.random_fleet(7, 0.8, 3, 5)
    there = sum(device.total for node in state.nodes.values() for device in node.inventory.devices) // GIB
    assert 0 < one.ours.memory <= there
    assert 0 < one.ours.replicas <= one.wanted
    assert one.by_memory == one.ours.memory / 10_000
    assert one.by_count == one.ours.replicas / 100
    assert packing.line(one).endswith("optimal")


def test_the_solver_packs_a_small_fleet_at_least_as_full(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools", reason="the solver is in requirements/bench.txt only")
    packing.main(["--seconds", "2", "--seeds", "1", "--nodes", "2", "3", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["load"] for row in rows] == list(packing.LOADS)
    assert all(row["by_memory"] <= 1.0 for row in rows if row["best"]["proven"])


def test_transfers_are_measured_against_the_plain_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ["--size", "6MiB", "--files", "2", "--runs", "1", "--memory", "64MiB"]
    transfer.main([*small, "--into", str(tmp_path), "--json"])
    found = printed(capsys)
    names = [
        "from a directory, against cp",
        "the same, by SHA-256 (the mirror)",
        "from a node, against one stream",
        "from a web server, the same",
    ]
    assert [one["name"] for one in found["races"]] == names
    assert all(one["ours"] > 0 and one["ratio"] == one["ours"] / one["plain"] for one in found["races"])
    assert 0 < found["memory"] < transfer.MEMORY_GOAL
    assert list(tmp_path.iterdir()) == []


def test_jobs_with_and_without_tracing_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    tracing.main(["--served", "0", "--jobs", "1", "--rounds", "1", "--seconds", "0", "--json"])
    [cost] = printed(capsys)
    assert cost["name"] == "a job on a node without engine"
    assert cost["on"] > 0
    assert cost["ratio"] == cost["on"] / cost["off"]

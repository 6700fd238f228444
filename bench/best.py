"""The best packing of a fleet that OR-Tools' CP-SAT finds in a given time."""

from collections.abc import Iterator
from typing import NamedTuple

from ortools.sat.python import cp_model

from bench.fleets import GIB, Packing
from fleet.spec import ModelSpec
from fleet.state import CPU, Device, FleetState

WORKERS = 2
"""Threads of the solver: this project is measured on two cores."""


class Place(NamedTuple):
    """A device in the problem."""

    node: str
    uuid: str
    total: int
    """GiB."""


def best_packing(state: FleetState, seconds: float) -> Packing:
    """The most memory on the devices of an empty fleet, and of such packings the most replicas.

    Replicas of one model are alike, so the problem counts them: how many shards of a model a node holds, and how many
    of those use each of its devices. Such counts are a packing exactly when each device's count is at most the
    node's and their sum is the devices that the node's shards need: shards then take devices in turn.
    """
    problem = cp_model.CpModel()
    used: dict[Place, list[cp_model.LinearExpr]] = {}
    placed = {key: problem.new_int_var(0, model.spec.replicas, "") for key, model in state.models.items()}
    for key, model in state.models.items():
        spec = model.spec
        shards = [
            _shards_on_node(problem, spec, placed[key], places, used) for places in _places(state, spec, _memory(spec))
        ]
        problem.add(sum(shards) == spec.shards * placed[key])
    for place, parts in used.items():
        problem.add(sum(parts) <= place.total)
    sizes = {key: _memory(model.spec) * _devices(model.spec) * model.spec.shards for key, model in state.models.items()}
    replicas = sum(model.spec.replicas for model in state.models.values())
    problem.maximize(sum((sizes[key] * (replicas + 1) + 1) * count for key, count in placed.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    status = solver.solve(problem)
    counts = {key: solver.value(count) for key, count in placed.items()}
    return Packing(
        memory=sum(sizes[key] * count for key, count in counts.items()),
        replicas=sum(counts.values()),
        proven=status == cp_model.OPTIMAL,
    )


def _shards_on_node(
    problem: cp_model.CpModel,
    spec: ModelSpec,
    placed: cp_model.IntVar,
    places: list[Place],
    used: dict[Place, list[cp_model.LinearExpr]],
) -> cp_model.IntVar:
    memory = _memory(spec)
    shards = problem.new_int_var(0, spec.replicas, "")
    problem.add(shards <= placed)  # the shards of one replica go to different nodes
    counts: list[cp_model.IntVar] = []
    for place in places:
        count = problem.new_int_var(0, min(spec.replicas, place.total // memory), "")
        problem.add(count <= shards)
        used.setdefault(place, []).append(memory * count)
        counts.append(count)
    problem.add(sum(counts) == _devices(spec) * shards)
    return shards


def _places(state: FleetState, spec: ModelSpec, memory: int) -> Iterator[list[Place]]:
    """Each node's devices that one shard could use; only nodes that have enough of them."""
    for node in state.nodes.values():
        fitting = [
            device for device in node.inventory.devices if _suits(device, spec) and device.total // GIB >= memory
        ]
        if len(fitting) >= _devices(spec):
            yield [Place(node.id, device.uuid, device.total // GIB) for device in fitting]


def _suits(device: Device, spec: ModelSpec) -> bool:
    return (device.uuid == CPU) == (spec.need.gpus == 0)


def _memory(spec: ModelSpec) -> int:
    return spec.need.memory // GIB


def _devices(spec: ModelSpec) -> int:
    return max(1, spec.need.gpus)

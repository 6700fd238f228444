"""How well the planner packs: what it places on random fleets, against the best packing that a solver finds.

Run it as `python -m bench.packing`; it needs the packages of `requirements/bench.txt`.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import NamedTuple

from bench.fleets import GIB, GPU_SIZES, Packing, fleet, model, node
from fleet.commits import commit
from fleet.planning import plan
from fleet.state import CPU, FleetState, ModelRecord

LOADS = (0.8, 1.0, 1.4)
"""Memory wanted over memory there is: what nearly fits, what just fits, and more than fits."""

NOW = 1_000.0


class Comparison(NamedTuple):
    """One fleet packed twice."""

    seed: int
    load: float
    nodes: int
    models: int
    wanted: int
    """Replicas."""
    ours: Packing
    best: Packing
    our_seconds: float
    best_seconds: float

    @property
    def by_memory(self) -> float:
        """Our memory over the best one's."""
        return self.ours.memory / self.best.memory

    @property
    def by_count(self) -> float:
        """Our replicas over those of the same best packing."""
        return self.ours.replicas / self.best.replicas


Packer = Callable[[FleetState], Packing]


def random_fleet(seed: int, load: float, least: int, most: int) -> FleetState:
    """Nodes of mixed sizes and models of one priority that want `load` times their memory, RAM and GPUs alike."""
    chance = random.Random(seed)  # noqa: S311 - the same fleet every time
    nodes = [
        node(f"n{number:02}", chance.choice((1, 2, 4, 8)), chance.choice(GPU_SIZES), chance.choice((64, 128, 256)))
        for number in range(chance.randint(least, most))
    ]
    devices = [device for one in nodes for device in one.inventory.devices]
    left_ram = load * sum(device.total for device in devices if device.uuid == CPU)
    left_gpu = load * sum(device.total for device in devices if device.uuid != CPU)
    models: list[ModelRecord] = []
    while left_ram > 0 or left_gpu > 0:
        on_cpu = left_ram > 0 and (left_gpu <= 0 or chance.random() < 0.25)
        made = _random_model(chance, len(models), on_cpu)
        wanted = made.spec.need.memory * max(1, made.spec.need.gpus) * made.spec.shards * made.spec.replicas
        left_ram -= wanted * on_cpu
        left_gpu -= wanted * (not on_cpu)
        models.append(made)
    return fleet(nodes, models)


def packed(state: FleetState) -> Packing:
    """What one pass of ours places."""
    after = commit(state, plan(state, NOW), NOW)
    shards = [shard for replica in after.replicas.values() for shard in replica.shards]
    memory = sum(share.memory for shard in shards for share in shard.devices)
    return Packing(memory // GIB, len(after.replicas))


def compare(seed: int, load: float, nodes: tuple[int, int], best: Packer) -> Comparison:
    """Pack one random fleet both ways."""
    state = random_fleet(seed, load, *nodes)
    started = time.perf_counter()
    ours = packed(state)
    between = time.perf_counter()
    found = best(state)
    return Comparison(
        seed=seed,
        load=load,
        nodes=len(state.nodes),
        models=len(state.models),
        wanted=sum(one.spec.replicas for one in state.models.values()),
        ours=ours,
        best=found,
        our_seconds=between - started,
        best_seconds=time.perf_counter() - between,
    )


def line(one: Comparison) -> str:
    """A comparison as a person reads it."""
    return (
        f"{one.seed:4} {one.load:4.1f} {one.nodes:5} {one.models:6} {one.wanted:6}  "
        f"{one.ours.memory:6} {one.best.memory:6} {one.by_memory:7.3f}  "
        f"{one.ours.replicas:5} {one.best.replicas:5} {one.by_count:7.3f}  "
        f"{one.our_seconds:6.2f} {one.best_seconds:6.1f} {'optimal' if one.best.proven else 'best so far'}"
    )


HEADING = (
    "seed load nodes models wanted  memory   best   ratio  count  best   ratio    ours solver\n"
    "                                  GiB    GiB                                 s      s"
)


def main(arguments: list[str] | None = None) -> None:
    """Compare fleet after fleet, and print each ratio and the lowest."""
    parser = argparse.ArgumentParser(prog="python -m bench.packing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="the solver's time for one fleet")
    parser.add_argument("--seeds", type=int, default=6, help="how many fleets for each load")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--nodes", type=int, nargs=2, default=(20, 40), metavar=("LEAST", "MOST"))
    parser.add_argument("--json", action="store_true", help="one JSON object a fleet instead of a table")
    asked = parser.parse_args(arguments)

    # Here and not at the top: only this needs the solver, which the tests' environment lacks.
    from bench.best import best_packing

    if not asked.json:
        print(HEADING)
    found: list[Comparison] = []
    for seed in range(asked.first, asked.first + asked.seeds):
        for load in LOADS:
            one = compare(seed, load, tuple(asked.nodes), lambda state: best_packing(state, asked.seconds))
            found.append(one)
            print(json.dumps(_flat(one)) if asked.json else line(one), flush=True)
    if not asked.json:
        print(
            f"lowest by memory {min(one.by_memory for one in found):.3f}, "
            f"by count {min(one.by_count for one in found):.3f}, of {len(found)} fleets"
        )


def _flat(one: Comparison) -> dict[str, object]:
    ratios = {"by_memory": one.by_memory, "by_count": one.by_count}
    return {**one._asdict(), "ours": one.ours._asdict(), "best": one.best._asdict(), **ratios}


def _random_model(chance: random.Random, number: int, on_cpu: bool) -> ModelRecord:
    gpus = 0 if on_cpu else chance.choice((1, 1, 2, 3, 4))
    replicas = chance.randint(1, 6)
    shards = 1 if on_cpu else chance.choice((1, 1, 1, 1, 2))
    sizes = ((4, 48),) if on_cpu else ((4, 22), (8, 46), (20, 78))
    memory = chance.randint(*chance.choice(sizes)) * GIB
    name = f"m{number:03}"
    return model(name, memory=memory, gpus=gpus, replicas=replicas, shards=shards, applied_at=float(number))


if __name__ == "__main__":
    main()

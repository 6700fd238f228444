"""How fast the planner is: one placement, whole plans, and how their time grows with nodes and replicas.

Run it as `python -m bench.placement`. Times are medians of processor time: what others do on the machine does not
count. Beside each stands the same in units of a bare Python loop over the nodes and devices.
"""

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from bench.fleets import GIB, empty_nodes, fleet, mixed_models, model, node
from fleet.commits import commit
from fleet.placement import place
from fleet.planning import plan
from fleet.room import room_of
from fleet.spec import Scaling
from fleet.state import FleetState, ModelRecord, NodeRecord, ReplicaState
from fleet.steps import Plan
from runtime import collector

NOW = 1_000.0
LATER = 100_000.0
"""Long after everything was placed: what nobody asked for since is idle."""

WAITING = 50
"""Models that fit nowhere, each with a need of its own."""

Result = TypeVar("Result")


class Size(NamedTuple):
    """How large the fleet is."""

    nodes: int = 1000
    gpus: int = 8
    """Of each node."""
    replicas: int = 2000
    models: int = 100


class Measure(NamedTuple):
    """One thing measured."""

    name: str
    seconds: float
    """The median of `runs`."""
    runs: int
    loops: float
    """The same in bare loops over the same nodes and devices."""
    goal: float = 0.0
    """Seconds it should stay under at 1,000 nodes and 2,000 replicas; 0 where there is none."""
    outcome: str = ""
    """What came out, so that a fast wrong answer is seen."""


class Growth(NamedTuple):
    """One full plan."""

    nodes: int
    replicas: int
    seconds: float
    ratio: float
    """Time for each node and replica, over that of the smallest plan: 1 grows as nodes x replicas, less is better."""


def measured(size: Size, runs: int) -> list[Measure]:
    """Every single measure, in the order in which a fleet meets them."""
    nodes = empty_nodes(size.nodes, size.gpus)
    empty = fleet(nodes, mixed_models(size.replicas, size.models))
    loop, _ = processor_time(lambda: bare_loop(nodes), 20)
    found: list[Measure] = []

    def add(name: str, act: Callable[[], Result], outcome: Callable[[Result], str], goal: float, times: int) -> Result:
        seconds, result = processor_time(act, times)
        found.append(Measure(name, seconds, times, seconds / loop, goal, outcome(result)))
        return result

    room, spec = room_of(empty), empty.models["m0000"].spec
    add("one placement", lambda: place(spec, "r", room), lambda d: f"{len(d.verdicts)} verdicts", 0.05, runs)
    first = add("full plan on empty nodes", lambda: plan(empty, NOW), _steps, 10.0, 1)
    full = serving(commit(empty, first, NOW))
    add("quiet plan", lambda: plan(full, NOW), _steps, 0.0, runs)
    one_more = full.with_model(_with_one_more(full.models["m0000"]))
    add("plan for one replica more", lambda: plan(one_more, NOW), _steps, 0.1, runs)
    add("plan for one new model", lambda: plan(_with_new(full), NOW), _steps, 0.1, runs)
    for name, idle in (("plan that preempts", False), ("plan that evicts", True)):
        tight = _with_important(sold_out(size.nodes, size.models, idle=idle))
        add(name, lambda tight=tight: plan(tight, LATER), _steps, 1.0, runs)  # type: ignore[misc]
    waits = _with_waiting(sold_out(size.nodes, size.models, idle=False), WAITING)
    add(f"plan with {WAITING} that wait", lambda: plan(waits, LATER), _steps, 0.0, min(runs, 3))
    return found


def grown(size: Size) -> list[Growth]:
    """Full plans of a quarter, a half and the whole of the nodes and replicas, each with each."""
    found: list[Growth] = []
    for nodes in (size.nodes // 4, size.nodes // 2, size.nodes):
        for replicas in (size.replicas // 4, size.replicas // 2, size.replicas):
            models = max(1, size.models * replicas // size.replicas)
            state = fleet(empty_nodes(nodes, size.gpus), mixed_models(replicas, models))
            gc.collect()  # what the size before left behind is not this one's
            seconds, _ = processor_time(lambda state=state: plan(state, NOW), 1)  # type: ignore[misc]
            unit = found[0] if found else Growth(nodes, replicas, seconds, 1.0)
            expected = unit.seconds * nodes * replicas / (unit.nodes * unit.replicas)
            found.append(Growth(nodes, replicas, seconds, seconds / expected))
    return found


def bare_loop(nodes: list[NodeRecord]) -> int:
    """The least that asking every device of every node can cost in Python."""
    fitting = 0
    for one in nodes:
        for device in one.inventory.devices:
            if device.total >= 40 * GIB:
                fitting += 1
    return fitting


def processor_time(act: Callable[[], Result], runs: int) -> tuple[float, Result]:
    """The median of several runs, in seconds, and the last result."""
    took: list[float] = []
    for _ in range(runs):
        started = time.process_time()
        result = act()
        took.append(time.process_time() - started)
    return statistics.median(took), result


def serving(state: FleetState) -> FleetState:
    """Everything placed serves."""
    update = {"state": ReplicaState.SERVING, "endpoint": "http://127.0.0.1:1"}
    return state.model_copy(
        update={"replicas": {key: replica.model_copy(update=update) for key, replica in state.replicas.items()}}
    )


def sold_out(nodes: int, models: int, *, idle: bool) -> FleetState:
    """Nodes of 8 GPUs, on each two replicas that leave no GPU with room; `idle`: they may all be evicted."""
    each = -(-2 * nodes // models)
    scaling = Scaling(min=0, max=max(1, each), idle_after_s=2 * LATER, cooldown_s=2 * LATER) if idle else None
    made = []
    for number in range(models):
        one = model(f"m{number:04}", memory=45 * GIB, gpus=4, replicas=each, priority=number % 5)
        update = {"spec": one.spec.model_copy(update={"scaling": scaling}), "scaled": each if idle else None}
        made.append(one.model_copy(update=update))
    state = fleet([node(f"n{number:04}", 8, 80, 512) for number in range(nodes)], made)
    return serving(commit(state, plan(state, NOW), NOW))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("--nodes", type=int, default=Size().nodes)
    parser.add_argument("--gpus", type=int, default=Size().gpus)
    parser.add_argument("--replicas", type=int, default=Size().replicas)
    parser.add_argument("--models", type=int, default=Size().models)
    parser.add_argument("--runs", type=int, default=9, help="of everything but the full plans, which run once")
    parser.add_argument("--no-collector", action="store_true", help="with Python's garbage collector off")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    size = Size(asked.nodes, asked.gpus, asked.replicas, asked.models)
    collector.quieten()  # as worker.py does, which makes the plans
    if asked.no_collector:
        gc.disable()
    try:
        measures, growths = measured(size, asked.runs), grown(size)
    finally:
        gc.enable()
    if asked.json:
        parts = {"measures": [one._asdict() for one in measures], "growth": [one._asdict() for one in growths]}
        print(json.dumps({"size": size._asdict(), **parts}, indent=2))
        return
    print(f"{size.nodes} nodes x {size.gpus} GPUs, {size.replicas} replicas of {size.models} models")
    print(f"{'':28} {'median ms':>10} {'goal ms':>8} {'loops':>8}  outcome")
    for one in measures:
        goal = f"{one.goal * 1000:.0f}" if one.goal else ""
        print(f"{one.name:28} {one.seconds * 1000:10.1f} {goal:>8} {one.loops:8.1f}  {one.outcome}")
    print(f"\n{'full plan':28} {'ms':>10}  time over nodes x replicas, against the first")
    for two in growths:
        print(f"{f'{two.nodes} nodes, {two.replicas} replicas':28} {two.seconds * 1000:10.1f}  {two.ratio:.2f}")


def _steps(decided: Plan) -> str:
    kinds = Counter(step.kind.value if step.places or step.decision is None else "refused" for step in decided.steps)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "quiet"


def _with_one_more(record: ModelRecord) -> ModelRecord:
    spec = record.spec.model_copy(update={"replicas": record.spec.replicas + 1})
    return record.model_copy(update={"spec": spec})


def _with_new(state: FleetState) -> FleetState:
    return state.with_model(model("new", memory=10 * GIB, gpus=1, replicas=1, applied_at=NOW))


def _with_waiting(state: FleetState, count: int) -> FleetState:
    for number in range(count):
        one = model(f"w{number:02}", memory=(40 + number % 20) * GIB, gpus=1 + number % 4, replicas=1, priority=0)
        state = state.with_model(one)
    return state


def _with_important(state: FleetState) -> FleetState:
    return state.with_model(model("big", memory=60 * GIB, gpus=4, replicas=1, priority=90, applied_at=LATER - 1))


if __name__ == "__main__":
    main()

"""What tracing costs: the time of a job, and the CPU of an agent that serves, with tracing on against off in one run.

python -m bench.tracing [--served 10] [--jobs 40] [--rounds 4] [--seconds 60] [--json]

Jobs that serve a model with the real engine run by turns on two systems, one traced and one not. What of a job is
llmgw's own shows with a node that has no engine: there a job is nothing but control plane, in processes that take
turns on one dev server, on, off, off, on. Two agents serve side by side with the real engine, one traced and one not,
so that both see the same machine. All need what `./ctl test` brings: Temporal's binary, engine and model of the tests.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from runtime import tracing
from runtime.config import TracingConfig
from runtime.temporal import connect_exactly
from tests.control import control_plane
from tests.real_engine import ROOT, prepare
from tests.servers import own_server
from tests.system import system

JOB_GOAL, AGENT_GOAL = 1.02, 1.01
"""On over off, at most; a job without an engine has no goal: it is there to see what tracing itself takes."""
WARM_UP = 3
"""Jobs that are not counted: the first ones import, connect and fill caches."""


class Cost(NamedTuple):
    """One measure: seconds with tracing and without."""

    name: str
    on: float
    off: float
    goal: float | None

    @property
    def ratio(self) -> float:
        """On over off."""
        return self.on / self.off


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; `--child` is a process of the first part."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing", description=__doc__)
    parser.add_argument("--served", type=int, default=10, help="jobs with the real engine; 0 leaves them out")
    parser.add_argument("--jobs", type=int, default=40, help="without an engine, of each process")
    parser.add_argument("--rounds", type=int, default=4, help="processes with tracing, and as many without")
    parser.add_argument("--seconds", type=float, default=60.0, help="of serving; 0 leaves the agents out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("ADDRESS", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(asyncio.run(_jobs(given.child[0], given.child[1], given.jobs))))
        return
    costs = [asyncio.run(cost_of_served_jobs(given.served))] if given.served else []
    costs.append(asyncio.run(cost_of_jobs(given.jobs, given.rounds)))
    if given.seconds:
        costs.append(asyncio.run(cost_of_serving(given.seconds)))
    if given.json:
        print(json.dumps([{**cost._asdict(), "ratio": cost.ratio} for cost in costs]))
        return
    for cost in costs:
        kept = "kept" if cost.goal is None or cost.ratio <= cost.goal else "not kept"
        goal = f" (goal {cost.goal}: {kept})" if cost.goal is not None else ""
        print(f"{cost.name:<34}{cost.on:9.4f} s on{cost.off:9.4f} s off{cost.ratio:8.3f}{goal}")


async def cost_of_served_jobs(jobs: int) -> Cost:
    """The median time of a job with the real engine, from its start to the answer of the smoke test."""
    if why := prepare():
        raise SystemExit(f"{why}; --served 0 leaves these jobs out")
    took: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as home:
        async with system(Path(home) / "on") as on, system(Path(home) / "off") as off:
            both = {True: on, False: off}
            for traced, running in both.items():
                running.start_worker(tracing=traced)
                running.start_agent("n1", tracing=traced)
                await running.ready("n1")
            for number in range(WARM_UP + jobs):
                for traced in (True, False) if number % 2 else (False, True):
                    began = time.monotonic()
                    await (await both[traced].serve(name=f"m{number}")).result()
                    if number >= WARM_UP:
                        took[traced].append(time.monotonic() - began)
                    await (await both[traced].job({"kind": "remove", "name": f"m{number}"})).result()
    return Cost("a job with the real engine", statistics.median(took[True]), statistics.median(took[False]), JOB_GOAL)


async def cost_of_jobs(jobs: int, rounds: int) -> Cost:
    """The median time of one job on a node without an engine."""
    took: dict[bool, list[float]] = {True: [], False: []}
    async with own_server() as environment:
        address = environment.client.service_client.config.target_host
        with tempfile.TemporaryDirectory() as directory:
            for number in range(2 * rounds):
                traced = number % 4 in (0, 3)  # what drifts with time falls on both alike
                file = f"{directory}/{number}.jsonl" if traced else ""
                command = [sys.executable, "-m", "bench.tracing", "--jobs", str(jobs), "--child", address, file]
                done = await asyncio.to_thread(
                    subprocess.run, command, capture_output=True, text=True, check=True, cwd=ROOT
                )
                took[traced] += json.loads(done.stdout.splitlines()[-1])
                if traced and not Path(file).read_text(encoding="utf-8").count("serve model"):
                    raise RuntimeError("tracing was to be on, and no span of a job was written")
    return Cost("a job on a node without engine", statistics.median(took[True]), statistics.median(took[False]), None)


async def cost_of_serving(seconds: float) -> Cost:
    """CPU seconds of two agents that serve side by side; half-way they change roles: the node is no part of it."""
    if why := prepare():
        raise SystemExit(f"{why}; --seconds 0 leaves the agents out")
    spent = {True: 0.0, False: 0.0}
    with tempfile.TemporaryDirectory() as directory:
        async with system(Path(directory)) as running:
            running.start_worker()
            for first in (True, False):
                for node, traced in (("n1", first), ("n2", not first)):
                    running.start_agent(node, tracing=traced)
                await running.ready("n1", "n2")
                await (await running.serve(replicas=2)).result()
                agents = {first: psutil.Process(running.processes["n1"].pid)}
                agents[not first] = psutil.Process(running.processes["n2"].pid)
                before = {traced: _cpu(agent) for traced, agent in agents.items()}
                await asyncio.sleep(seconds / 2)
                for traced, agent in agents.items():
                    spent[traced] += _cpu(agent) - before[traced]
                for node in ("n1", "n2"):
                    running.kill(node, signal.SIGTERM)
    return Cost("CPU of an agent that serves", spent[True], spent[False], AGENT_GOAL)


async def _jobs(address: str, file: str, count: int) -> list[float]:
    """The child: seconds of each serve job, from its start to its end."""
    config = TracingConfig(enabled=bool(file), file=Path(file) if file else None)
    flush = tracing.install(config, "bench")
    took: list[float] = []
    client = await connect_exactly(address, "default")
    with contextlib.redirect_stdout(sys.stderr):
        async with control_plane(client) as cell, cell.node("n1") as node:
            await node.join()
            warm_up = min(WARM_UP, count)
            for number in range(warm_up + count):
                began = time.monotonic()
                await cell.run({"repo": "file:/models/m.gguf", "name": f"m{number}"})
                if number >= warm_up:
                    took.append(time.monotonic() - began)
                await cell.run({"kind": "remove", "name": f"m{number}"})
    flush()
    return took


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()

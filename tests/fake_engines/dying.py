"""An agent's parts in a process of their own that is killed at a named point of a start or a stop.

Run as `python -m tests.fake_engines.dying HOME FIRST_PORT POINT ACT [knob=value …]`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.ledger import Entry, Ledger
from agent.probe import Answer, Probe
from agent.processes import Mark
from agent.supervisor import EngineProcess, Supervisor
from tests.fake_engines.acts import start, stop
from tests.fake_engines.node import FakeNode

START_POINTS = (
    "before it is written down",
    "before the spawn",
    "after the spawn",
    "before its pids are written down",
    "while it is waited for",
    "before it is written down as ready",
)
STOP_POINTS = ("before TERM", "in the grace", "before it is forgotten")

POINT = sys.argv[3] if len(sys.argv) > 3 else ""


def reached(point: str) -> None:
    """The kernel ends this process here, if this is the point."""
    if point == POINT:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingLedger(Ledger):
    def reserve(self, entry: Entry) -> None:
        reached("before it is written down")
        super().reserve(entry)

    def put(self, entry: Entry) -> None:
        reached("before it is written down as ready" if entry.ready else "before its pids are written down")
        super().put(entry)

    def drop(self, entry: Entry) -> None:
        reached("before it is forgotten")
        super().drop(entry)


class DyingSupervisor(Supervisor):
    def _spawn(self, stem: str, command: Sequence[str], variables: Mapping[str, str]) -> Mark:
        reached("before the spawn")
        shim = super()._spawn(stem, command, variables)
        reached("after the spawn")
        return shim

    async def stop(self, process: EngineProcess, grace_s: float, seen: set[Mark] | None = None) -> bool:
        reached("before TERM")
        return await super().stop(process, grace_s, seen)

    async def _gone_within(self, process: Mark, seconds: float) -> None:
        reached("in the grace")
        await super()._gone_within(process, seconds)


class DyingProbe(Probe):
    async def health(self, endpoint: str, path: str) -> Answer:
        reached("while it is waited for")
        return await super().health(endpoint, path)


async def main() -> None:
    home, first_port, act, knobs = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4], sys.argv[5:]
    async with DyingProbe() as probe:
        node = FakeNode(
            home,
            probe,
            ports=(first_port, first_port + 19),
            ledger_kind=DyingLedger,
            supervisor_kind=DyingSupervisor,
        )
        await (start(node, *knobs) if act == "start" else stop(node, grace_s=1.0))


if __name__ == "__main__":
    asyncio.run(main())

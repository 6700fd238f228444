"""A job's steps while they run: a live table in a terminal, a line for each change elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.table import Table

from activities.contract import JobStatus, StepState, StepStatus
from cli.console import note, out, table
from fleet.render import duration

COLUMNS = ("", "STEP", "STATE", "TOOK", "DETAIL")

SIGNS = {
    StepState.PENDING: "·",
    StepState.RUNNING: "▸",
    StepState.DONE: "✓",
    StepState.FAILED: "✗",
    StepState.SKIPPED: "-",
}


@contextmanager
def progress(title: str) -> Iterator[Callable[[JobStatus], None]]:
    """Yields what to call with each new status."""
    console = out()
    if not console.is_terminal:
        yield LineProgress(note).show
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield lambda status: live.update(steps_table(title, status, time.time()))


class LineProgress:
    """Says each step's state and detail once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: dict[str, str] = {}

    def show(self, status: JobStatus) -> None:
        """Say what changed."""
        for step in status.steps:
            line = step_line(step)
            if step.state is not StepState.PENDING and self._said.get(step.name) != line:
                self._said[step.name] = line
                self._say(line)


def step_line(step: StepStatus) -> str:
    """`✓ mirror: done in 1.2 s: copied 94 MiB`."""
    took = f" in {duration(step.ended_at - step.started_at)}" if step.started_at and step.ended_at else ""
    detail = f": {step.detail}" if step.detail else ""
    return f"{SIGNS[step.state]} {step.name}: {step.state}{took}{detail}"


def steps_table(title: str, status: JobStatus, now: float) -> Table:
    """All steps; the time of a running one goes up to `now`."""
    return table(COLUMNS, (_row(step, now) for step in status.steps), title=title)


def _row(step: StepStatus, now: float) -> tuple[str, ...]:
    took = ""
    if step.started_at:
        took = duration(max(0.0, (step.ended_at or now) - step.started_at))
    return (SIGNS[step.state], step.name, step.state, took, step.detail)

"""A job's steps while they run: a live table in a terminal, a line for each change elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.table import Table

from activities.contract import JobStatus, StepState, StepStatus
from cli.console import note, out, table
from fleet.render import duration

PROGRESS_EVERY_S = 10.0
"""Between two lines that say only how far a step is: a terminal shows it live, a log should not fill with it."""

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
    """Says each step's state and detail once, of any number of jobs, and now and then how far it is."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[str, str, float]] = {}
        """By job and step: the line without its progress, the progress, and when that was said."""

    def show(self, status: JobStatus, prefix: str = "") -> None:
        """Say what changed, behind the prefix."""
        for step in status.steps:
            if step.state is StepState.PENDING:
                continue
            key, now = (status.job, step.name), self._clock()
            line, (before, progress, said_at) = step_line(step), self._said.get(key, ("", "", now))
            bare = step_line(step.model_copy(update={"progress": ""}))
            due = step.progress != progress and now - said_at >= PROGRESS_EVERY_S
            if bare != before or due:
                self._said[key] = bare, step.progress, now
                self._say(f"{prefix}{line}")


def step_line(step: StepStatus) -> str:
    """`✓ mirror: done in 1.2 s: copied 94 MiB`, `▸ mirror: running: 1.2 GiB of 4 GiB, 310 MiB/s`."""
    took = f" in {duration(step.ended_at - step.started_at)}" if step.started_at and step.ended_at else ""
    said = told(step)
    detail = f": {said}" if said else ""
    return f"{SIGNS[step.state]} {step.name}: {step.state}{took}{detail}"


def told(step: StepStatus) -> str:
    """Its detail and how far it is."""
    return "; ".join(filter(None, (step.detail, step.progress)))


def steps_table(title: str, status: JobStatus, now: float) -> Table:
    """All steps; the time of a running one goes up to `now`."""
    return table(COLUMNS, (_row(step, now) for step in status.steps), title=title)


def _row(step: StepStatus, now: float) -> tuple[str, ...]:
    took = ""
    if step.started_at:
        took = duration(max(0.0, (step.ended_at or now) - step.started_at))
    return (SIGNS[step.state], step.name, step.state, took, told(step))

"""Whose turn it is: jobs on one model run one after the other, in the order in which they asked.

Pure: each function takes the queues by model id and returns the next ones, or what is to be told.
"""

from collections.abc import Collection, Mapping

from fleet.records import Record
from fleet.spec import JobKind


class Waiting(Record):
    """A job in a queue; the first one has its turn."""

    job: str
    """Workflow id."""
    kind: JobKind = JobKind.SERVE


class Turn(Record):
    """What a job is told about its turn, again whenever that changes."""

    granted: bool
    waiting: str = ""
    """Why it is not its turn yet: `job/serve/m/1 on the same model`."""
    behind: Waiting | None = None
    """Who waits for this job to end: a remove where there is one, else the next. Told with a granted turn only."""


Queues = Mapping[str, tuple[Waiting, ...]]
"""By model id; a model without a job has no entry."""


def enter(queues: Queues, model: str, job: str, kind: JobKind) -> Queues:
    """Line up; a job that is in the queue keeps its place."""
    line = queues.get(model, ())
    if any(one.job == job for one in line):
        return queues
    return {**queues, model: (*line, Waiting(job=job, kind=kind))}


def leave(queues: Queues, job: str) -> Queues:
    """Go, from whatever place; who is in no queue is gone already."""
    if not any(one.job == job for line in queues.values() for one in line):
        return queues
    left = {model: tuple(one for one in line if one.job != job) for model, line in queues.items()}
    return {model: line for model, line in left.items() if line}


def turns(queues: Queues, going: Collection[str]) -> dict[str, Turn]:
    """Everybody's turn, by job. `going`: ids of models that are being removed: only a remove has its turn there.

    One that waits is told of the job just ahead, so that a long queue that moves tells each of them but once.
    """
    told: dict[str, Turn] = {}
    for model, line in queues.items():
        for place, one in enumerate(line):
            told[one.job] = _first(line, model in going) if place == 0 else _later(line[place - 1])
    return told


def _first(line: tuple[Waiting, ...], going: bool) -> Turn:
    if going and line[0].kind is not JobKind.REMOVE:
        return Turn(granted=False, waiting="the model's removal, which is under way")
    others = line[1:]
    removes = [one for one in others if one.kind is JobKind.REMOVE]
    return Turn(granted=True, behind=next(iter(removes or others), None))


def _later(ahead: Waiting) -> Turn:
    return Turn(granted=False, waiting=f"{ahead.job} on the same model")

"""`ctl model plan`: what an apply would do, and to whom, without doing it."""

from pathlib import Path
from typing import Annotated

import typer

from activities.contract import Snapshot
from cli.console import JsonFlag, print_json, run, say
from cli.models_file import Changes, compare, read_models
from cli.session import open_session
from fleet.forecast import PASSES, Pass, Unplanned, passes, wish
from fleet.plan_text import explained_lines, plan_lines
from fleet.records import Record
from fleet.steps import Step

FileOption = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="models.yaml: `models:` and a list of models.")
]
PruneFlag = Annotated[bool, typer.Option("--prune", help="Also remove the models that the file does not have.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="With every node's answer and the parts of its score.")]


class ChangeView(Record):
    """A model that an apply would serve again, or remove."""

    model: str
    action: str
    """serve or remove."""
    why: str


class PassView(Record):
    """One pass: each begins when what the one before asked for has gone well."""

    scaled: dict[str, int]
    """Models whose number of replicas changes by demand."""
    steps: tuple[Step, ...]


class PlanView(Record):
    """`ctl model plan --json` and `ctl apply --dry-run --json`."""

    changes: tuple[ChangeView, ...]
    unchanged: tuple[str, ...]
    unplanned: tuple[Unplanned, ...]
    """Models that cannot be planned, each with a sentence; an apply would look at them all the same."""
    passes: tuple[PassView, ...]


def plan(
    file: FileOption,
    prune: PruneFlag = False,
    verbose: Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what an apply of a file would do: starts, ends, evictions, preemptions, refusals. Nothing is done.

    Example: ctl model plan -f models.yaml -v
    """
    show_plan(file, prune=prune, verbose=verbose, as_json=as_json)


def show_plan(file: Path, *, prune: bool, verbose: bool, as_json: bool) -> None:
    """Print it."""
    fleet, changes = run(_asked(file, prune=prune))
    now = fleet.now  # what it compares with deadlines and ages: the clock of this machine may be another
    wished, unplanned = wish(fleet.state, [one.request for one in changes.serve], changes.remove, now)
    # What the fleet does for other reasons is not this file's doing.
    found = () if changes.none else passes(wished, now)
    if as_json:
        print_json(plan_view(changes, unplanned, found))
        return
    for line in plan_text(changes, unplanned, found, verbose=verbose):
        say(line)


def plan_view(changes: Changes, unplanned: tuple[Unplanned, ...], found: tuple[Pass, ...]) -> PlanView:
    """The stable shape."""
    return PlanView(
        changes=(
            *(ChangeView(model=one.request.name or "", action="serve", why=one.why) for one in changes.serve),
            *(ChangeView(model=name, action="remove", why="the file does not have it") for name in changes.remove),
        ),
        unchanged=changes.same,
        unplanned=unplanned,
        passes=tuple(PassView(scaled=one.plan.scaled, steps=one.plan.steps) for one in found),
    )


def plan_text(
    changes: Changes, unplanned: tuple[Unplanned, ...], found: tuple[Pass, ...], *, verbose: bool
) -> list[str]:
    """What a person reads."""
    same = len(changes.same)
    if changes.none:
        return [f"nothing to do: {same} model{' is' if same == 1 else 's are'} as the file says"]
    lines = [f"{one.request.name}: {one.why}" for one in changes.serve]
    lines += [f"{name}: removed, the file does not have it" for name in changes.remove]
    lines += [f"{one.model} is not in this plan: {one.sentence}" for one in unplanned]
    for number, one in enumerate(found):
        lines += ["", "at once:" if number == 0 else "then, when that has gone well:"]
        made = explained_lines if verbose else plan_lines
        lines += [f"  {line}" for line in made(one.plan, one.state)]
    if not found:
        lines += ["", "no replica starts or ends for it"]
    if len(found) == PASSES:
        lines += ["", f"and so on: {PASSES} passes are looked ahead"]
    return lines


async def _asked(file: Path, *, prune: bool) -> tuple[Snapshot, Changes]:
    session = await open_session()
    requests = read_models(file, session.cell)
    fleet = await session.snapshot()
    return fleet, compare(fleet.state, requests, prune=prune)

"""`ctl model explain`: why a model is where it is, each node's answer, and what would change it."""

from typing import Annotated

import typer

from cli.console import JsonFlag, print_json, print_table, run, say
from cli.session import open_session
from fleet import explain as reasons
from fleet.explain import Explanation
from fleet.plan_text import held_by_others, score_parts, verdict_amount
from fleet.state import Outcome, Verdict
from fleet.wishes import find_model

COLUMNS = ("NODE", "OUTCOME", "REASON", "NEED", "FREE", "CAPACITY", "OTHERS", "SCORE", "PARTS")

WAYS_SHOWN = 3
"""A person tries the nearest ones; `--json` has all."""


def explain(name: Annotated[str, typer.Argument(help="The model's name.")], as_json: JsonFlag = False) -> None:
    """Why a model is where it is or waits: the last decision, every node's answer now, and what would change it.

    Example: ctl model explain qwen-72b
    """
    explanation = run(_explained(name))
    if as_json:
        print_json(explanation)
        return
    for line in standing_lines(explanation):
        say(line)
    say("")
    say(f"one more replica now: {explanation.now.sentence}")
    rows = [verdict_row(verdict) for verdict in explanation.now.verdicts]
    print_table(COLUMNS, rows, "no node has joined")
    for line in way_lines(explanation):
        say(line)


def standing_lines(explanation: Explanation) -> list[str]:
    """How it stands: the last decision, what waits, what was given up."""
    last = explanation.last
    lines = [f"last decision: {last.replica}: {last.sentence}" if last is not None else "no placement was tried yet"]
    if explanation.waiting:
        lines.append(f"waits: {explanation.waiting}")
    if explanation.failure is not None:
        lines.append(f"given up: {explanation.failure.line}; then `ctl model retry {explanation.model}`")
    return lines


def way_lines(explanation: Explanation) -> list[str]:
    """What would change it, the nearest first; nothing where it fits."""
    ways, advice = explanation.ways, explanation.advice
    if not ways and not advice:
        return []
    what = "what would change it" if explanation.more <= 1 else f"{explanation.more} more nodes must fit"
    lines = ["", f"{what}:"]
    lines += [f"  {way.sentence}" for way in ways[:WAYS_SHOWN]]
    if len(ways) > WAYS_SHOWN:
        lines.append(f"  … and {len(ways) - WAYS_SHOWN} more (--json lists them)")
    return lines + [f"  {line}" for line in advice]


def verdict_row(verdict: Verdict) -> tuple[str, ...]:
    """For COLUMNS."""
    amounts = [""] * 3
    if verdict.outcome is not Outcome.EXCLUDED:
        amounts = [verdict_amount(verdict, count) for count in (verdict.need, verdict.free, verdict.capacity)]
    fits = verdict.outcome is Outcome.FITS
    return (
        verdict.node,
        verdict.outcome,
        verdict.reason or "",
        *amounts,
        held_by_others(verdict),
        f"{verdict.score:.2f}" if fits else "",
        score_parts(verdict),
    )


async def _explained(name: str) -> Explanation:
    state = await (await open_session()).state()
    return reasons.explain(state, find_model(state, name))

"""The terminal: tables, JSON, plain lines, and the loop that runs a command until it ends or is interrupted."""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

PIPED_WIDTH = 240
"""Columns where the output is no terminal: wide enough that a line of a table stays one line for grep."""

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class InterruptedRun(BaseException):
    """SIGINT, SIGTERM or SIGHUP ended the command, after it cleaned up."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. SIGINT, SIGTERM and SIGHUP cancel it, and become InterruptedRun once it has ended."""
    try:
        return asyncio.run(_cancelled_by_signals(main))
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        raise InterruptedRun from error


def out() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False)


def say(text: str) -> None:
    """One line for the operator: what was done, or the answer."""
    print(text, flush=True)


def say_lines(lines: Iterable[str]) -> None:
    """Many lines, written together."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def note(text: str) -> None:
    """One line beside the answer, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: BaseModel | Sequence[BaseModel]) -> None:
    """A model as an object, several as a list."""
    if isinstance(value, BaseModel):
        data: object = value.model_dump(mode="json")
    else:
        data = [item.model_dump(mode="json") for item in value]
    print(json.dumps(data, indent=2, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """Text in columns; what it says may come from a model's repo, so no markup is read in it."""
    made = Table(*columns, box=None, pad_edge=False, title=title or None, title_justify="left", header_style="bold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """A listing, or one sentence where it is empty."""
    if rows:
        out().print(table(columns, rows))
    else:
        say(empty)


async def _cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    if task is not None:  # always, below asyncio.run
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, task.cancel)
    return await main

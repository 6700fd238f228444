"""`ctl test`: the checks every change must pass; the `ctl` wrapper has installed the tools."""

import os
import subprocess
import sys

import typer

from cli.console import say
from cli.home import REPO

PACKAGES = ("fleet", "activities", "runtime", "workflows", "agent", "gateway", "cli", "bench", "tests", "worker.py")

LINT = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--check", "--no-cache", "."),
    ("mypy", *PACKAGES),
)


SIDE_BY_SIDE = ["-n", "2", "--dist", "loadfile", "--durations", "15"]
"""Two processes that take the test files in turn: half of the time a test waits for other processes to start."""


def test(context: typer.Context) -> None:
    """Lint, types and tests. With arguments, which all go to pytest, only the tests.

    Example: ctl test tests/test_spans.py -k linked
    """
    for command in () if context.args else LINT:
        say(f"$ {' '.join(command)}")
        _end_with(subprocess.run([sys.executable, "-m", *command], cwd=REPO, env=os.environ, check=False).returncode)
    arguments = context.args or SIDE_BY_SIDE
    say(f"$ pytest {' '.join(arguments)}")
    _end_with(
        subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=REPO, env=os.environ, check=False).returncode
    )


def _end_with(code: int) -> None:
    if code != 0:
        raise typer.Exit(code)

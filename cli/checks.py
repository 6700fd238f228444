"""`ctl test`: the checks every change must pass; the `ctl` wrapper has installed the tools."""

import os
import subprocess
import sys

import typer

from cli.console import say
from cli.home import REPO

PACKAGES = ("fleet", "activities", "runtime", "workflows", "agent", "gateway", "cli", "tests", "worker.py")

LINT = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--check", "--no-cache", "."),
    ("mypy", *PACKAGES),
)


def test(context: typer.Context) -> None:
    """Lint, types and tests. With arguments, which all go to pytest, only the tests.

    Example: ctl test tests/test_spans.py -k linked
    """
    commands = [] if context.args else [*LINT]
    commands.append(("pytest", *context.args))
    for command in commands:
        say(f"$ {' '.join(command)}")
        done = subprocess.run([sys.executable, "-m", *command], cwd=REPO, env=os.environ, check=False)
        if done.returncode != 0:
            raise typer.Exit(done.returncode)

"""`ctl test`: the checks every change must pass; the `ctl` wrapper has installed the tools.

The tests run as two processes at once: half of the time they wait for other processes to start.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from cli.console import say
from cli.home import REPO

PACKAGES = ("fleet", "activities", "runtime", "workflows", "agent", "gateway", "cli", "bench", "tests", "worker.py")

LINT = (
    ("ruff", "check", "--no-cache", "."),
    ("ruff", "format", "--check", "--no-cache", "."),
    ("mypy", *PACKAGES),
)


BESIDE = (
    "test_cli_*.py",
    "test_ctl_wrapper.py",
    "test_demand.py",
    "test_demo.py",
    "test_download.py",
    "test_gateway*.py",
    "test_install.py",
    "test_registry.py",
    "test_shards.py",
    "test_supervisor.py",
    "test_transfer.py",
)
"""Files of tests/ that the second process runs: every test that starts the embedded system on its usual ports is
among them, and both take about as long."""


def test(context: typer.Context) -> None:
    """Lint, types and tests. With arguments, which all go to pytest, only the tests.

    Example: ctl test tests/test_spans.py -k linked
    """
    for command in () if context.args else LINT:
        say(f"$ {' '.join(command)}")
        _end_with(subprocess.run([sys.executable, "-m", *command], cwd=REPO, env=os.environ, check=False).returncode)
    if context.args:
        say(f"$ pytest {' '.join(context.args)}")
        _end_with(subprocess.run([*PYTEST, *context.args], cwd=REPO, env=os.environ, check=False).returncode)
        return
    _end_with(_two_at_once())


PYTEST = (sys.executable, "-m", "pytest")


def _two_at_once() -> int:
    """Run all tests; the second process's output is shown when the first has ended. Returns the worse exit code."""
    tests = REPO / "tests"
    beside = sorted({path for pattern in BESIDE for path in tests.glob(pattern)})
    rest = [path for path in sorted(tests.glob("test_*.py")) if path not in beside]
    say(f"$ pytest ({len(rest)} files, and {len(beside)} more beside them)")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        cache = ("-o", "cache_dir=.pytest_cache/beside")
        second = subprocess.Popen([*PYTEST, *cache, *_names(beside)], cwd=REPO, stdout=output, stderr=output)
        try:
            first = subprocess.run([*PYTEST, *_names(rest)], cwd=REPO, env=os.environ, check=False).returncode
            code = second.wait()
        finally:
            if second.poll() is None:
                second.terminate()
                second.wait()
        output.seek(0)
        say(output.read())
    return first or code


def _names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(REPO)) for path in paths]


def _end_with(code: int) -> None:
    if code != 0:
        raise typer.Exit(code)

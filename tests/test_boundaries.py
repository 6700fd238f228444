"""The boundaries of CONTRIBUTING.md, read out of the sources: who imports what, how long a module may be."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

OTEL_API = (
    "opentelemetry.trace",
    "opentelemetry.context",
    "opentelemetry.metrics",
    "opentelemetry.propagate",
    "opentelemetry.util",
)

ALLOWED: dict[str, tuple[str, ...]] = {
    "fleet": ("fleet", "pydantic"),
    "runtime": (
        "runtime",
        "fleet",
        "pydantic",
        "yaml",
        "temporalio",
        "opentelemetry",
        "prometheus_client",
        "httpx",
        "requests",
        "urllib3",
        "blake3",
        "obstore",
        "filelock",
    ),
    "workflows": (
        "workflows",
        "fleet",
        "activities.contract",
        "activities.node_contract",
        "temporalio.workflow",
        "temporalio.common",
        "temporalio.exceptions",
        *OTEL_API,
    ),
    "activities": (
        "activities",
        "fleet",
        "runtime",
        "pydantic",
        "temporalio",
        "httpx",
        "huggingface_hub",
        "httpx2",  # the hub's client speaks through it: its errors are caught
        *OTEL_API,
    ),
    "agent": (
        "agent",
        "fleet",
        "runtime",
        "activities.contract",
        "activities.node_contract",
        "pydantic",
        "temporalio",
        "httpx",
        "filelock",
        "psutil",
        "uv",
        *OTEL_API,
    ),
    "gateway": (
        "gateway",
        "fleet",
        "runtime",
        "activities.contract",
        "activities.node_contract",
        "temporalio",
        "httpx",
        "starlette",
        "uvicorn",
        *OTEL_API,
    ),
    "cli": (
        "cli",
        "fleet",
        "runtime",
        "activities.contract",
        "activities.node_contract",
        "pydantic",
        "temporalio",
        "httpx",
        "filelock",
        "psutil",
        "rich",
        "typer",
        "uv",
        *OTEL_API,
    ),
    "worker.py": ("workflows", "activities", "runtime", "temporalio"),
}
"""Besides the standard library. A name stands for itself and all beneath it."""

ALONE: dict[str, tuple[str, ...]] = {
    "agent/shim.py": (),
    "agent/engines/llamacpp_launcher.py": ("xllamacpp",),
    "agent/engines/beside/llmgw_guard.py": (),
    "agent/engines/beside/llmgw_in_flight.py": ("prometheus_client",),
    "agent/engines/beside/llmgw_sglang.py": (),
    "cli/bootstrap.py": (),
}
"""Run by another interpreter than ours, so they may import only this besides the standard library."""

IMPURE = frozenset(
    {
        "asyncio",
        "datetime",
        "io",
        "locale",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "platform",
        "random",
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "urllib.request",
        "uuid",
    }
)
"""A clock, chance, or the world: fleet/ takes such values as arguments."""

IMPURE_CALLS = frozenset({"open", "input", "print", "exec", "eval", "__import__"})

LAZY: dict[str, tuple[str, ...]] = {"agent/gpus.py": ("pynvml",)}
"""Imports inside a function that are meant: what a machine may lack."""

NAMES_TO_AVOID = re.compile(r"(Manager|Helper|Helpers|Utils|Util|Service)$")

MAX_LINES = 400


@dataclass(frozen=True)
class Import:
    """One imported module."""

    name: str
    line: int
    inside: bool
    """In a function."""


def sources() -> list[Path]:
    found = [ROOT / "worker.py"]
    for package in ALLOWED:
        found.extend(sorted((ROOT / package).rglob("*.py")))
    return [path for path in found if path.exists()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[Import]:
    """Every module the tree imports; `from a import b` counts as `a.b` where that is a module of ours, else as `a`."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, inside)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from (Import(_module(base, alias.name), node.lineno, inside) for alias in node.names)
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack.extend((child, deeper) for child in ast.iter_child_nodes(node))


def _module(base: str, name: str) -> str:
    whole = f"{base}.{name}"
    ours = ROOT / whole.replace(".", "/")
    if ours.is_dir() or ours.with_suffix(".py").exists():
        return whole
    # The two packages whose parts are told apart; their submodules are written as names too.
    return whole if base in ("opentelemetry", "temporalio") else base


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _allowed(path: Path) -> tuple[str, ...]:
    name = name_of(path)
    if name in ALONE:
        return ALONE[name]
    allowed = ALLOWED[name.split("/")[0]]
    return allowed + LAZY.get(name, ())


# -- the checker itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os.path", [("os.path", False)]),
        ("from activities import contract", [("activities.contract", False)]),
        ("from activities.contract import Route, Routes", [("activities.contract", False)] * 2),
        ("from temporalio import workflow", [("temporalio.workflow", False)]),
        ("def f():\n    import random", [("random", True)]),
        ("class A:\n    import json", [("json", False)]),
        ("async def f():\n    if 1:\n        from runtime import config", [("runtime.config", True)]),
    ],
)
def test_imports_are_found(code: str, found: list[tuple[str, bool]]) -> None:
    assert [(one.name, one.inside) for one in imports(ast.parse(code))] == found


def test_a_name_allows_what_is_beneath_it_only() -> None:
    assert within("fleet.state", ("fleet",))
    assert not within("fleets", ("fleet",))
    assert not within("activities.place", ("activities.contract",))


# -- the rules --------------------------------------------------------------------------------------------------------


def all_imports() -> Iterator[tuple[Path, Import]]:
    for path in sources():
        yield from ((path, one) for one in imports(parse(path)))


def told(path: Path, line: int, what: str) -> str:
    return f"{name_of(path)}:{line}: {what}"


def test_a_module_imports_what_its_package_may() -> None:
    assert [
        told(path, one.line, one.name)
        for path, one in all_imports()
        if one.name.split(".")[0] not in sys.stdlib_module_names and not within(one.name, _allowed(path))
    ] == []


def test_only_runtime_knows_the_telemetry_sdk_and_temporals_extras() -> None:
    extras = ("opentelemetry.sdk", "opentelemetry.exporter", "temporalio.contrib")
    assert [
        told(path, one.line, one.name)
        for path, one in all_imports()
        if within(one.name, extras) and not name_of(path).startswith("runtime/")
    ] == []


def test_imports_stand_at_the_top() -> None:
    assert [
        told(path, one.line, one.name)
        for path, one in all_imports()
        if one.inside and not within(one.name, LAZY.get(name_of(path), ()))
    ] == []


def test_fleet_is_pure() -> None:
    wrong: list[str] = []
    for path in sorted((ROOT / "fleet").rglob("*.py")):
        tree = parse(path)
        wrong += [told(path, one.line, one.name) for one in imports(tree) if one.name in IMPURE]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
                wrong.append(told(path, node.lineno, f"{node.func.id}()"))
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                wrong.append(told(path, node.lineno, "async"))
    assert wrong == []


def test_a_module_says_what_it_is_for() -> None:
    assert [name_of(path) for path in sources() if not ast.get_docstring(parse(path))] == []


def test_a_module_is_short() -> None:
    lengths = {
        name_of(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_classes_are_named_by_the_fields_nouns() -> None:
    assert [
        told(path, node.lineno, node.name)
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and NAMES_TO_AVOID.search(node.name)
    ] == []


# -- the words of every file ------------------------------------------------------------------------------------------

UNFINISHED = tuple(first + second for first, second in (("TO", "DO"), ("FIX", "ME"), ("Not", "ImplementedError")))
FOREIGN = tuple(
    first + second
    for first, second in (
        ("pyp", "i.org"),
        ("python", "hosted.org"),
        ("npm", "js.org"),
        ("proxy.gol", "ang.org"),
        ("crat", "es.io"),
        ("/wo", "rk/"),
        ("/tm", "p/s/"),
        ("/ro", "ot/"),
    )
)
"""Hosts of package registries, which are the machine's own setting, and paths that exist on one machine only.

Written in two halves, or this file would be the first to hold them."""

NOT_OURS = frozenset({"LICENSE", ".git"})  # the latter is a file in a worktree, and git's own


def texts() -> Iterator[tuple[str, str]]:
    """Every text file of the checkout."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if hidden or "__pycache__" in parts or not path.is_file() or parts[-1] in NOT_OURS:
            continue
        try:
            yield name_of(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@pytest.mark.parametrize("word", [*UNFINISHED, *FOREIGN])
def test_no_file_holds(word: str) -> None:
    assert [name for name, text in texts() if word in text] == []

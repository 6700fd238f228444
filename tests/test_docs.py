"""The papers against the code: every setting, every reason, every span and every link they name is as they say."""

import enum
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from activities.contract import STEPS
from fleet.reasons import REASONS
from fleet.render import size
from fleet.spec import JobKind
from fleet.steps import StepKind
from runtime.config import AgentConfig, Section, ServerConfig, load
from workflows.messages import Wait

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
FILES: dict[str, type[Section]] = {"server.yaml": ServerConfig, "agent.yaml": AgentConfig}

COMPUTED_DEFAULTS = {"node": "the host's name", "engines": "llamacpp alone"}


# -- settings ---------------------------------------------------------------------------------------------------------


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, type and default of every setting, in the order of the model, sections opened."""
    for name, field in model.model_fields.items():
        key = prefix + name
        section = _section(field.annotation)
        if get_origin(field.annotation) is dict and section is not None:
            yield key, "sections by engine", _default(name, field)
            yield from settings(section, f"{key}.<engine>.")
        elif section is not None:
            yield from settings(section, f"{key}.")
        else:
            yield key, _type(field), _default(name, field)


def _section(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Section)), None)


def _type(field: FieldInfo) -> str:
    bounds = [
        text
        for mark in field.metadata
        for kind, attribute, sign in ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"))
        if isinstance(mark, kind)
        for text in [f"{sign} {getattr(mark, attribute):g}"]
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return _name(next(one for one in arguments if one is not type(None)))
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    if origin is dict:
        return "texts by name"
    if origin is tuple:
        return "list of texts" if arguments[-1] is Ellipsis else "two whole numbers"
    names = {
        bool: "`true` or `false`",
        ByteSize: "size",
        int: "whole number",
        float: "number",
        str: "text",
        Path: "path",
    }
    return names[annotation]


def _default(name: str, field: FieldInfo) -> str:
    if name in COMPUTED_DEFAULTS:
        return COMPUTED_DEFAULTS[name]
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, ByteSize):
        return f"`{size(value).replace(' ', '')}`"
    if isinstance(value, enum.Enum):
        return f"`{value.value}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def rows(paper: Path, heading: str) -> list[list[str]]:
    """The cells of the tables beneath a heading, header rows left out."""
    text = paper.read_text(encoding="utf-8")
    section = re.split(rf"^## .*{re.escape(heading)}.*$", text, flags=re.MULTILINE)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]
    return [row for index, row in enumerate(cells) if index > 1 and not row[0].startswith("--")]


@pytest.mark.parametrize("file", FILES)
def test_every_setting_is_documented_with_its_type_and_default(file: str) -> None:
    documented = [tuple(row[:3]) for row in rows(DOCS / "configuration.md", file)]
    assert documented == [(f"`{key}`", kind, default) for key, kind, default in settings(FILES[file])]
    assert all(len(row) == 4 and row[3] for row in rows(DOCS / "configuration.md", file)), "each with its meaning"


@pytest.mark.parametrize("file", FILES)
def test_the_example_is_valid_and_shows_every_setting(file: str) -> None:
    path = DOCS / file
    assert isinstance(load(path, FILES[file]), FILES[file])
    shown = set(_keys(yaml.safe_load(path.read_text(encoding="utf-8"))))
    keys = [key for key, _, _ in settings(FILES[file])]
    missing = [key for key in keys if key.replace("<engine>", "llamacpp") not in shown]
    assert missing == []


def _keys(value: Any, prefix: str = "") -> Iterator[str]:
    for key, item in value.items():
        yield prefix + key
        if isinstance(item, dict):
            yield from _keys(item, f"{prefix}{key}.")


@pytest.mark.parametrize("file", FILES)
def test_every_setting_of_an_example_is_explained_beside_it(file: str) -> None:
    for line in (DOCS / file).read_text(encoding="utf-8").splitlines():
        assert not line.strip() or "#" in line, f"{line!r} has no comment"


# -- reasons, spans, steps --------------------------------------------------------------------------------------------


def test_every_reason_is_in_the_table_of_failures() -> None:
    expected = [
        [f"`{reason}`", meaning.step or "any", "yes" if meaning.retryable else "no", meaning.advice]
        for reason, meaning in REASONS.items()
    ]
    assert rows(DOCS / "operations.md", "What to do for each failure") == expected


SPANS = (
    *(kind.value for kind in StepKind),
    *STEPS,
    *(f"{kind.value} model" for kind in JobKind),
    "check model",
    *(wait.value for wait in Wait),
    "wait for turn",
    "wait for hub",
    "look up",
    "wait for worker",
    "wait for node",
    "wait for cause",
    "wait for install",
    "tell fleet",
    "node lost",
    "node left",
    "interrupted start",
    "note start",
    "note stop",
    "choose port",
    "check memory",
    "measure memory",
    "reconcile",
    "decide",
    "place",
    "start replica",
    "send prepare",
    "send start",
    "prepare shard",
    "reserve port",
    "check port",
    "start shard",
    "install engine",
    "fetch weights",
    "wait for peer",
    "copy weights",
    "rendezvous",
    "launch engine",
    "wait for engine",
    "drain shard",
    "stop shard",
    "stop engine",
    "adopt",
    "gateway request",
    "ctl <command>",
    "start ctl",
    "start system",
    "get model",
    "ask model",
    "connect",
    "start job",
    "wait until empty",
)


def test_every_span_is_in_the_table_of_spans() -> None:
    named = {name for row in rows(DOCS / "tracing.md", "Spans") for name in re.findall(r"`([^`]+)`", row[0])}
    assert named == set(SPANS)


# -- words and links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(paper: Path) -> None:
    text = paper.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (paper.parent / target).exists(), target


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_every_file_a_paper_names_exists(paper: Path) -> None:
    tops = "fleet|runtime|activities|workflows|agent|gateway|cli|tests|docs|deploy|requirements|bench"
    named = re.findall(rf"`((?:{tops})/[\w./-]*)`", paper.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_has_the_commands_a_newcomer_needs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("git clone", "./ctl demo", "./ctl test", "temporal workflow start", "./ctl model serve"):
        assert command in text


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert text.count("\n   9. Accepting Warranty or Additional Liability.") == 1
    assert "END OF TERMS AND CONDITIONS" in text

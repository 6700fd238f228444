"""models.yaml: the models a fleet should serve, and what an apply of it would change."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cli.jobs import repo_argument
from fleet.inputs import OF_THE_JOB, typed_fault
from fleet.records import Typed
from fleet.spec import JobKind, JobRequest, ModelName, ModelRequest, safe_id
from fleet.state import FleetState
from runtime.config import ConfigError, Document, read

NOT_COMPARED = OF_THE_JOB | {"name"}
"""Of a request: they say which model of whom is meant, not how it should be. A name may come from the repo."""


class ModelEntry(ModelRequest):
    """One model of the file."""

    name: ModelName
    repo: Annotated[str, Field(min_length=1, max_length=2000)]
    """As for `ctl model serve`; a path is relative to the file."""


class ModelsFile(Typed):
    """The whole file."""

    models: tuple[ModelEntry, ...]


@dataclass(frozen=True)
class Serve:
    """A model that is new, or not as the file says."""

    request: JobRequest
    why: str
    """`new`, or what differs."""


@dataclass(frozen=True)
class Changes:
    """What an apply has to do."""

    serve: tuple[Serve, ...]
    remove: tuple[str, ...]
    """Names of models the file does not have."""
    same: tuple[str, ...]
    """Names of models that are as the file says."""

    @property
    def none(self) -> bool:
        """Whether there is nothing to do."""
        return not self.serve and not self.remove


def read_models(path: Path, cell: str) -> tuple[JobRequest, ...]:
    """The wishes in a file, in its order. Raises ConfigError with a line for each thing that is wrong."""
    document = read(path)
    entries = document.parse(ModelsFile).models
    _refuse_twins(document, entries)
    _refuse_faults(document, entries)
    base = path.resolve().parent
    return tuple(
        JobRequest.model_validate(
            {
                **dict(entry),
                "cell": cell,
                "kind": JobKind.SERVE,
                "repo": repo_argument(entry.repo, base),
                # A file says what there should be, also where there is no room for it yet.
                "room_deadline_s": None,
            }
        )
        for entry in entries
    )


def compare(state: FleetState, requests: Sequence[JobRequest], *, prune: bool) -> Changes:
    """What must be done so that the catalog is as the file says; `prune`: remove what the file does not have."""
    serve: list[Serve] = []
    same: list[str] = []
    for request in requests:
        why = _difference(state, request)
        if why:
            serve.append(Serve(request, why))
        else:
            same.append(request.name or "")
    named = {safe_id(request.name or "") for request in requests}
    others = [model for key, model in sorted(state.models.items()) if key not in named and not model.removing]
    return Changes(tuple(serve), tuple(model.spec.name for model in others) if prune else (), tuple(same))


def _refuse_twins(document: Document, entries: Sequence[ModelEntry]) -> None:
    first: dict[str, int] = {}
    twins = []
    for index, entry in enumerate(entries):
        earlier = first.setdefault(safe_id(entry.name), index)
        if earlier != index:
            what = f"{entry.name} stands in the file twice, first as models.{earlier}: remove one of them"
            twins.append(document.complaint(("models", index, "name"), what))
    if twins:
        raise ConfigError("\n".join(twins))


def _refuse_faults(document: Document, entries: Sequence[ModelEntry]) -> None:
    found = [(index, fault) for index, entry in enumerate(entries) if (fault := typed_fault(entry))]
    if found:
        told = [(index, *fault.partition(": ")) for index, fault in found]
        raise ConfigError("\n".join(document.complaint(("models", index, key), what) for index, key, _, what in told))


def _difference(state: FleetState, request: JobRequest) -> str:
    """Why a model must be served (again); empty where it is as the request says."""
    model = state.models.get(safe_id(request.name or ""))
    if model is None:
        return "new"
    if model.removing:
        return "it is being removed"
    had = model.spec.request
    if had is None:
        return "it is not known what was asked for"
    old, new = (one.model_dump(mode="json", exclude=set(NOT_COMPARED)) for one in (had, request))
    return ", ".join(f"{key} {_brief(old[key])} → {_brief(new[key])}" for key in new if old[key] != new[key])


def _brief(value: object) -> str:
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item not in ("", {}, None)}
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
    return str(value) if value not in (None, "", []) else "none"

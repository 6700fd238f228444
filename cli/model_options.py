"""The options of one model, shared by `ctl model serve` and `ctl model update`, put into a job's input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from cli.errors import CtlError
from cli.jobs import missing_file, repo_argument
from fleet.inputs import input_sentence, typed_fault
from fleet.spec import Engine, JobKind, JobRequest, Task

RepoArgument = Annotated[
    str, typer.Argument(help="org/name (@revision, :variant) on the hub, file:/path, a path, https://… or s3://…")
]
NameOption = Annotated[str | None, typer.Option(help="The name clients use; from the repo where it is not given.")]
Token = Annotated[
    str | None, typer.Option(metavar="NAME", help="The token of server.yaml's hub.tokens that opens the repo.")
]
EngineOption = Annotated[Engine | None, typer.Option(help="From the weights' format where it is not given.")]
TaskOption = Annotated[
    Task | None, typer.Option("--task", help="What it is for; from its architecture where it is not given.")
]
Replicas = Annotated[int | None, typer.Option(help="How many copies to run.")]
Nodes = Annotated[int | None, typer.Option(help="Nodes one replica spans: all of them start, or none.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs of a replica on each of its nodes; 0: run on the CPU.")]
PipelineParallel = Annotated[
    int | None, typer.Option(metavar="STAGES", help="Spread the layers over stages; each layer over the rest.")
]
Memory = Annotated[str | None, typer.Option(help="What one shard needs, such as 12GiB; estimated if absent.")]
Priority = Annotated[int | None, typer.Option(help="0 to 100; higher ones are placed first.")]
ContextLength = Annotated[int | None, typer.Option(help="Tokens of one request, prompt and answer.")]
Concurrency = Annotated[int | None, typer.Option(help="Requests one replica works on at a time.")]
Minimum = Annotated[int | None, typer.Option("--min", help="Replicas by demand, at least; 0: none while it is idle.")]
Maximum = Annotated[int | None, typer.Option("--max", help="Replicas by demand, at most.")]
TargetInFlight = Annotated[float | None, typer.Option(help="Requests at a time that one replica should have.")]
IdleAfter = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="With --min 0: to zero after so long without a request.")
]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="Only on nodes with this label.")]
Preferred = Annotated[list[str] | None, typer.Option("--prefer", metavar="K=V", help="Rather on nodes with it.")]
Role = Annotated[str | None, typer.Option(help="Only on nodes with this role.")]
Interconnect = Annotated[
    str | None, typer.Option(metavar="LABEL", help="With --nodes: only nodes that share one value of this label.")
]
GpuModel = Annotated[str | None, typer.Option(help="Only on GPUs whose model has this in its name.")]
MaxSurge = Annotated[int | None, typer.Option(help="Replicas beyond the number while a new version rolls out.")]
MaxUnavailable = Annotated[int | None, typer.Option(help="Replicas that may be missing meanwhile.")]
Recreate = Annotated[bool, typer.Option("--recreate", help="With no room for the new version, stop the old one first.")]
EngineArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", help="A further argument for the engine, such as --arg=--seed=1. Of an update they replace all."
    ),
]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option("--trust-remote-code/--no-remote-code", help="Let it run Python that comes with the weights."),
]
WaitForRoom = Annotated[
    bool, typer.Option("--wait-for-room", help="Wait until a node has room, however long; a minute without it.")
]


@dataclass(frozen=True)
class WishOptions:
    """What may be said of a model beside its name and repo. Nothing said is nothing asked for."""

    token: Token = None
    engine: EngineOption = None
    task: TaskOption = None
    replicas: Replicas = None
    nodes: Nodes = None
    gpus: Gpus = None
    pipeline_parallel: PipelineParallel = None
    memory: Memory = None
    priority: Priority = None
    context_length: ContextLength = None
    concurrency: Concurrency = None
    minimum: Minimum = None
    maximum: Maximum = None
    target_in_flight: TargetInFlight = None
    idle_after: IdleAfter = None
    label: Labels = None
    prefer: Preferred = None
    role: Role = None
    interconnect: Interconnect = None
    gpu_model: GpuModel = None
    max_surge: MaxSurge = None
    max_unavailable: MaxUnavailable = None
    recreate: Recreate = False
    arg: EngineArguments = None
    trust_remote_code: TrustRemoteCode = None

    def given(self) -> dict[str, object]:
        """By the names of a job's input. Raises BadParameter."""
        said = {INPUT_NAMES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        lists = {
            "labels": pairs("--label", self.label) if self.label else None,
            "prefer": pairs("--prefer", self.prefer) if self.prefer else None,
            "args": listed(self.arg) if self.arg else None,
        }
        return {**said, **lists, "recreate": self.recreate or None}


INPUT_NAMES = {"minimum": "min", "maximum": "max", "idle_after": "idle_after_s", "label": "labels", "arg": "args"}
"""Where an option is not called as what it sets."""

CONSTRAINTS = ("labels", "prefer", "role", "gpu_model", "interconnect")
SCALING = ("min", "max", "target_in_flight", "idle_after_s")
ROLLOUT = ("max_surge", "max_unavailable", "recreate")


def wish(kind: JobKind, repo: str | None, given: Mapping[str, object], *, wait_for_room: bool = False) -> JobRequest:
    """The job's input, of what was given alone. Raises BadParameter or CtlError with a sentence that names it."""
    flat = {key: value for key, value in given.items() if value is not None}
    nested = {}
    for section, names in (("constraints", CONSTRAINTS), ("scaling", SCALING), ("rollout", ROLLOUT)):
        found = {name: flat.pop(name) for name in names if name in flat}
        if found:
            nested[section] = found
    said: dict[str, object] = {"kind": kind, **flat, **nested}
    if repo is not None:
        said["repo"] = checked_repo(repo)
    if wait_for_room:
        said["room_deadline_s"] = None
    try:
        request = JobRequest.model_validate(said)
    except ValidationError as error:
        raise typer.BadParameter(input_sentence(error)) from error
    refuse(typed_fault(request))
    return request


def refuse(fault: str) -> None:
    """Raises BadParameter where there is a fault."""
    if fault:
        raise typer.BadParameter(fault)


def listed(given: Sequence[str]) -> list[str]:
    """A list option alone and empty (`--arg ''`) is a list of nothing: how an update takes away what was there."""
    return [] if list(given) == [""] else list(given)


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """`zone=a` as a label. Raises BadParameter."""
    found: dict[str, str] = {}
    for text in listed(given):
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{option}: {text!r} is not KEY=VALUE, such as zone=a")
        found[key] = value
    return found


def checked_repo(repo: str) -> str:
    """The repo as a job takes it. Raises BadParameter or CtlError with a sentence."""
    if not repo.strip():
        raise typer.BadParameter("repo is empty: name one, such as org/name, or a file, such as ./model.gguf")
    if missing_file(repo, Path.cwd()):
        raise CtlError(
            f"no file {repo.removeprefix('file:')} here; a repo on the hub is org/name, and a file of the worker's "
            "machine is file:/path"
        )
    return repo_argument(repo, Path.cwd())

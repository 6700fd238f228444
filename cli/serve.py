"""`ctl model serve`: the options of one model, put into a job's input."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from cli.command_trace import run_traced
from cli.errors import CtlError
from cli.jobs import missing_file, repo_argument
from cli.model import NoWait, run_job
from fleet.inputs import input_sentence
from fleet.spec import Engine, JobKind, JobRequest

Labels = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="Only on nodes with this label.")]
Preferred = Annotated[list[str] | None, typer.Option("--prefer", metavar="K=V", help="Rather on nodes with it.")]


def serve(
    repo: Annotated[
        str, typer.Argument(help="org/name (@revision, :variant) on the hub, file:/path, a path, or https://…")
    ],
    name: Annotated[str | None, typer.Option(help="The name clients use; from the repo where it is not given.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="From the weights' format where it is not given.")] = None,
    replicas: Annotated[int, typer.Option(help="How many copies to run.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs for each replica; 0: run on the CPU.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="What one shard needs, such as 12GiB; estimated if absent.")
    ] = None,
    priority: Annotated[int, typer.Option(help="0 to 100; higher ones are placed first.")] = 50,
    context_length: Annotated[int | None, typer.Option(help="Tokens of one request, prompt and answer.")] = None,
    minimum: Annotated[
        int | None, typer.Option("--min", help="Replicas by demand, at least; 0: none while it is idle.")
    ] = None,
    maximum: Annotated[int | None, typer.Option("--max", help="Replicas by demand, at most.")] = None,
    target_in_flight: Annotated[
        float | None, typer.Option(help="Requests at a time that one replica should have.")
    ] = None,
    idle_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --min 0: to zero after so long without a request.")
    ] = None,
    label: Labels = None,
    prefer: Preferred = None,
    role: Annotated[str | None, typer.Option(help="Only on nodes with this role.")] = None,
    gpu_model: Annotated[str | None, typer.Option(help="Only on GPUs whose model has this in its name.")] = None,
    max_surge: Annotated[
        int | None, typer.Option(help="Replicas beyond the number while a new version rolls out.")
    ] = None,
    max_unavailable: Annotated[int | None, typer.Option(help="Replicas that may be missing meanwhile.")] = None,
    recreate: Annotated[
        bool, typer.Option("--recreate", help="With no room for the new version, stop the old one first.")
    ] = False,
    argument: Annotated[
        list[str] | None, typer.Option("--arg", help="A further argument for the engine, such as --arg=--seed=1.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let it run Python that comes with the weights.")
    ] = False,
    no_wait: NoWait = False,
) -> None:
    """Serve a model: look it up, mirror it, check it, place it, start it, try it.

    Example: ctl model serve ./SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2 --min 0 --max 4
    """
    if not repo.strip():
        raise typer.BadParameter("repo is empty: name one, such as org/name, or a file, such as ./model.gguf")
    if missing_file(repo, Path.cwd()):
        raise CtlError(
            f"no file {repo} here; a repo on the hub is org/name, and a file of the worker's machine is file:/path"
        )
    scaling = {
        "min": minimum,
        "max": maximum,
        "target_in_flight": target_in_flight,
        "idle_after_s": idle_after,
    }
    constraints = {
        "labels": pairs("--label", label or ()),
        "prefer": pairs("--prefer", prefer or ()),
        "role": role,
        "gpu_model": gpu_model,
    }
    rollout = {"max_surge": max_surge, "max_unavailable": max_unavailable, "recreate": recreate or None}
    given = {
        "repo": repo_argument(repo, Path.cwd()),
        "name": name,
        "engine": engine,
        "replicas": replicas,
        "gpus": gpus,
        "memory": memory,
        "priority": priority,
        "context_length": context_length,
        "constraints": _given(constraints),
        "scaling": _given(scaling) or None,
        "rollout": _given(rollout),
        "args": argument or (),
        "trust_remote_code": trust_remote_code,
    }
    run_traced("model serve", run_job(request_of(given), wait=not no_wait))


def request_of(given: Mapping[str, object]) -> JobRequest:
    """The job's input. Raises BadParameter with a sentence that names the field."""
    try:
        return JobRequest.model_validate({"kind": JobKind.SERVE, **given})
    except ValidationError as error:
        raise typer.BadParameter(input_sentence(error)) from error


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """`zone=a` as a label. Raises BadParameter."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{option}: {text!r} is not KEY=VALUE, such as zone=a")
        found[key] = value
    return found


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in options.items() if value is not None}

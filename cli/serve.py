"""`ctl model serve`, `mirror`, `update` and `remove`: the four kinds of jobs, started and followed."""

from typing import Annotated

import typer

from cli.command_trace import run_traced
from cli.console import JsonFlag
from cli.model import NoWait, run_job
from cli.model_options import (
    EngineOption,
    NameOption,
    RepoArgument,
    Token,
    TrustRemoteCode,
    WaitForRoom,
    WishOptions,
    wish,
)
from cli.option_group import with_options
from fleet.spec import JobKind, JobRequest


@with_options
def serve(
    *,
    repo: RepoArgument,
    name: NameOption = None,
    options: WishOptions,
    wait_for_room: WaitForRoom = False,
    no_wait: NoWait = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a model: look it up, mirror it, check it, place it, start it, try it.

    Example: ctl model serve ./SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2 --min 0 --max 4
    """
    request = wish(JobKind.SERVE, repo, {"name": name, **options.given()}, wait_for_room=wait_for_room)
    run_traced("model serve", run_job(request, wait=not no_wait, as_json=as_json))


def mirror(
    repo: RepoArgument,
    name: NameOption = None,
    token: Token = None,
    engine: EngineOption = None,
    trust_remote_code: TrustRemoteCode = None,
    no_wait: NoWait = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring a model's files into the mirror and serve nothing: a later serve finds them there.

    Example: ctl model mirror org/name@main:Q4_K_M
    """
    request = wish(
        JobKind.MIRROR, repo, {"name": name, "token": token, "engine": engine, "trust_remote_code": trust_remote_code}
    )
    run_traced("model mirror", run_job(request, wait=not no_wait, as_json=as_json))


@with_options
def update(
    *,
    name: Annotated[str, typer.Argument(help="The model's name.")],
    repo: Annotated[
        str | None, typer.Option(help="Another repo, revision or variant; the newest commit of the same where absent.")
    ] = None,
    options: WishOptions,
    wait_for_room: WaitForRoom = False,
    no_wait: NoWait = False,
    as_json: JsonFlag = False,
) -> None:
    """Change a model that is in the catalog: what is not given keeps its value, and the change is rolled out.

    An empty value takes away what was there: `--arg ''`, `--label ''`, `--role ''`.

    Example: ctl model update smollm2 --context-length 4096
    """
    request = wish(JobKind.UPDATE, repo, {"name": name, **options.given()}, wait_for_room=wait_for_room)
    run_traced("model update", run_job(request, wait=not no_wait, as_json=as_json))


def remove(
    name: Annotated[str, typer.Argument(help="The model's name.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Delete its files from the mirror too, unless another model uses them.")
    ] = False,
    no_wait: NoWait = False,
    as_json: JsonFlag = False,
) -> None:
    """Take a model out of the catalog; its replicas are drained and stopped.

    Example: ctl model remove smollm2 --weights
    """
    given: dict[str, object] = {"delete_weights": True} if weights else {}
    request = JobRequest.model_validate({"kind": JobKind.REMOVE, "name": name, **given})
    run_traced("model remove", run_job(request, wait=not no_wait, as_json=as_json))

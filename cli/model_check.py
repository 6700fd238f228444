"""`ctl model check`: would a repo be served, where, and what would it take; nothing is started or downloaded."""

import uuid
from typing import Annotated

import typer
from pydantic import ValidationError

from activities.contract import CONTROL_QUEUE, MODEL_CHECK_WORKFLOW, CheckReport
from cli.command_trace import run_traced
from cli.console import JsonFlag, print_json, print_table, say
from cli.jobs import TASK_TIMEOUT
from cli.model_options import (
    Concurrency,
    ContextLength,
    EngineArguments,
    EngineOption,
    Memory,
    NameOption,
    PipelineParallel,
    RepoArgument,
    Token,
    TrustRemoteCode,
    checked_repo,
    refuse,
)
from cli.session import open_session
from fleet.inputs import input_sentence, typed_fault
from fleet.paper import CheckWish, read_gpus
from fleet.render import size
from fleet.repos import default_name, parse_repo
from fleet.spec import safe_id

Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="N|NxSIZE", help="How many GPUs of a node to use, such as 2; or GPUs on paper, such as 2x80GiB."
    ),
]
Ram = Annotated[str | None, typer.Option(metavar="SIZE", help="RAM of a machine on paper, such as 64GiB.")]
Nodes = Annotated[
    int | None, typer.Option(help="How many such machines on paper; without any, nodes that one replica spans.")
]

COLUMNS = ("PART", "SIZE", "FROM")


def check(
    repo: RepoArgument,
    name: NameOption = None,
    token: Token = None,
    engine: EngineOption = None,
    gpus: Gpus = None,
    ram: Ram = None,
    nodes: Nodes = None,
    pipeline_parallel: PipelineParallel = None,
    memory: Memory = None,
    context_length: ContextLength = None,
    concurrency: Concurrency = None,
    argument: EngineArguments = None,
    trust_remote_code: TrustRemoteCode = None,
    as_json: JsonFlag = False,
) -> None:
    """Look a repo up, read its headers, and say whether it fits the fleet, or machines on paper. Changes nothing.

    Ends with 1 where it does not fit, or where its need is unknown.

    Example: ctl model check Qwen/Qwen2.5-7B-Instruct --gpus 1x24GiB --context-length 8192
    """
    machines = {"gpus": gpus if gpus and not gpus.isdecimal() else None, "ram": ram}
    paper = {key: value for key, value in machines.items() if value is not None}
    if paper and nodes is not None:
        paper["nodes"] = str(nodes)
    given = {
        "repo": checked_repo(repo),
        "name": name,
        "token": token,
        "engine": engine,
        "gpus": int(gpus) if gpus and gpus.isdecimal() and len(gpus) < 10 else None,
        "memory": memory,
        "context_length": context_length,
        "concurrency": concurrency,
        "args": tuple(argument or ()) or None,
        "trust_remote_code": trust_remote_code,
        "pipeline_parallel": pipeline_parallel,
        "paper": paper or None,
        "nodes": nodes if not paper else None,
    }
    if paper and pipeline_parallel:  # stages are shared out over a number that is known: all that is on the paper
        given |= {"gpus": _counted(paper.get("gpus")), "nodes": nodes}
    try:
        wish = CheckWish.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise typer.BadParameter(input_sentence(error)) from error
    refuse(typed_fault(wish, ram=wish.paper.ram if wish.paper is not None else None))
    report = run_traced("model check", _run(wish))
    if as_json:
        print_json(report)
    else:
        _show(report, wish)
    if report.check.reason is not None:
        raise typer.Exit(1)


def _counted(gpus: str | None) -> int | None:
    try:
        return len(read_gpus(gpus)) if gpus else None
    except ValueError:
        return None  # the wish says what is wrong with it


async def _run(wish: CheckWish) -> CheckReport:
    session = await open_session()
    name = wish.name or default_name(parse_repo(wish.repo or ""))
    report: CheckReport = await session.client.execute_workflow(
        MODEL_CHECK_WORKFLOW,
        wish.model_copy(update={"cell": session.cell}),
        id=f"check/{safe_id(name)}/{uuid.uuid4().hex[:8]}",
        task_queue=CONTROL_QUEUE,
        task_timeout=TASK_TIMEOUT,
        result_type=CheckReport,
    )
    return report


def _show(report: CheckReport, wish: CheckWish) -> None:
    found = report.check
    say(f"{report.repo} at {report.revision[:12]}: {size(report.size)}, {found.architecture}, for {found.engine}")
    print_table(COLUMNS, _rows(report, wish), "")
    say(f"{found.verdict}: {report.sentence}")


def _rows(report: CheckReport, wish: CheckWish) -> list[tuple[str, str, str]]:
    found, rows = report.check, []
    gpus = found.need.gpus
    each = f"on each of {gpus} GPUs" if gpus > 1 else "on its GPU" if gpus else "of RAM"
    if found.nodes > 1:
        each += f" of {found.nodes} nodes"
    if found.estimate is not None:
        of_one = f"{size(found.kv_bytes_per_token)} in all layers"
        tokens = f"{found.concurrency} × {found.context_length} tokens, of one {of_one}"
        rows += [
            ("weights", size(found.estimate.weights), "headers of the files"),
            ("KV cache", size(found.estimate.kv_cache), tokens),
            ("overhead", size(found.estimate.overhead), f"{found.engine}, measured"),
            ("estimate", size(found.estimate.total), each),
        ]
    if found.measured:
        rows.append(("measured", size(found.measured), "the peak of earlier runs of the same"))
    source = "--memory" if wish.memory is not None else each
    rows.append(("need", size(found.need.memory) if found.need.memory else "unknown", source))
    return rows

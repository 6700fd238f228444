"""`ctl replica`: the running copies of models, and what their engines wrote."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from cli import engine_logs
from cli.console import JsonFlag, note, print_json, print_table, run, say, say_lines
from cli.errors import CtlError
from cli.home import find_home
from cli.session import open_session
from cli.starts import doing
from cli.views import REPLICA_COLUMNS, ReplicaView, replica_row, replica_views
from fleet.state import FleetState, NodeRecord, ReplicaRecord, ReplicaState

app = typer.Typer(help="Replicas: the running copies of models.", no_args_is_help=True)


@app.command("list")
def list_replicas(as_json: JsonFlag = False) -> None:
    """The replicas with their state, what one that starts is doing, where they run, and why they failed last.

    Example: ctl replica list
    """
    views = run(_views())
    if as_json:
        print_json(views)
    else:
        print_table(REPLICA_COLUMNS, [replica_row(view) for view in views], "no replica exists; ctl model serve REPO")


@app.command("show")
def show_replica(
    replica: Annotated[str, typer.Argument(metavar="ID", help="The replica's id, as `ctl replica list` lists it.")],
    as_json: JsonFlag = False,
) -> None:
    """One replica: all that the listing has, and the trace of its start.

    Example: ctl replica show smollm2-0
    """
    views = run(_views())
    found = next((view for view in views if view.id == replica), None)
    if found is None:
        raise CtlError(_no_replica(replica, (view.id for view in views)))
    if as_json:
        print_json(found)
        return
    for name, value in zip(REPLICA_COLUMNS, replica_row(found), strict=True):
        say(f"{name.lower():<11}{value or '-'}")
    say(f"{'trace':<11}{f'{found.trace_id} (`ctl trace {replica}` draws it)' if found.trace_id else '-'}")


@app.command()
def logs(
    replica: Annotated[str, typer.Argument(metavar="ID", help="The replica's id, as `ctl replica list` lists it.")],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what it writes, and its successors.")
    ] = False,
    attempt: Annotated[
        str, typer.Option(metavar="GENERATION[-N]", help="Another launch than the newest, such as 7 or 7-1.")
    ] = "",
    previous: Annotated[bool, typer.Option("--previous", "-p", help="The launch before the newest.")] = False,
    whole: Annotated[bool, typer.Option("--all", help="All that is kept: the beginning too.")] = False,
) -> None:
    """What a replica's engine wrote, on the machine that runs it.

    A launch keeps the beginning of its output and the end. A replica of several shards has a log for each.

    Example: ctl replica logs smollm2-0 -f
    """
    if follow and (attempt or previous or whole):
        raise CtlError("--follow shows the newest launch: leave out --attempt, --previous and --all")
    if attempt and previous:
        raise CtlError("--attempt and --previous name two launches: leave one of them out")
    shards = _shards(replica)
    if follow:
        run(engine_logs.follow(shards, lines, say_lines, note))
        return
    for shard in shards:
        launch = engine_logs.choose(shard, attempt, previous=previous)
        if len(shards) > 1 or attempt or previous:
            note(f"{shard.name} {engine_logs.brief(launch)}:")
        say_lines(engine_logs.all_lines(launch) if whole else engine_logs.last_lines(launch, lines))


def _shards(replica: str) -> list[Path]:
    home = find_home()
    if home.agent_yaml.exists():
        found = engine_logs.shards_of(home.agent().data / "logs", replica)
        if found:
            return found
    record, nodes = run(_where(replica))
    for node in nodes:
        # On a machine that serves by an agent.yaml of its own, what its agent told leads there.
        found = engine_logs.shards_of(Path(node.inventory.logs), replica) if node.inventory.logs else []
        if found:
            return found
    raise CtlError(_elsewhere(record, nodes))


async def _where(replica: str) -> tuple[ReplicaRecord, list[NodeRecord]]:
    state = await _fleet()
    record = state.replicas.get(replica)
    if record is None:
        raise CtlError(_no_replica(replica, state.replicas))
    return record, [state.nodes[node] for node in dict.fromkeys(record.nodes) if node in state.nodes]


def _no_replica(replica: str, known: Iterable[str]) -> str:
    return f"no replica is named {replica}; there are: {', '.join(sorted(known)) or 'none'}"


def _elsewhere(record: ReplicaRecord, nodes: list[NodeRecord]) -> str:
    if not nodes:
        return f"replica {record.id} has no log on this machine, and runs nowhere just now: it is {record.state}"
    places = [
        f"on {node.id} ({node.inventory.address}) read {node.inventory.logs or 'logs'}/{record.id}.{rank}/latest"
        for rank, node in enumerate(nodes)
    ]
    return f"replica {record.id} has no log on this machine: {', and '.join(places)}"


async def _views() -> tuple[ReplicaView, ...]:
    session = await open_session()
    views = replica_views(await session.state())
    starting = [view.id for view in views if view.state in (ReplicaState.PLACED, ReplicaState.STARTING)]
    told = await doing(session.client, session.cell, starting)
    return tuple(view.model_copy(update={"doing": told.get(view.id, "")}) for view in views)


async def _fleet() -> FleetState:
    return await (await open_session()).state()

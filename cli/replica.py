"""`ctl replica`: the running copies of models, and what their engines wrote."""

from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from cli.console import JsonFlag, note, print_json, print_table, run, say
from cli.errors import CtlError
from cli.home import Home, find_home
from cli.session import open_session
from cli.starts import doing
from cli.views import REPLICA_COLUMNS, ReplicaView, replica_row, replica_views
from fleet.state import FleetState, ReplicaState

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


@app.command()
def logs(
    replica: Annotated[str, typer.Argument(metavar="ID", help="The replica's id, as `ctl replica list` lists it.")],
    lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 50,
) -> None:
    """The end of the log of a replica's newest engine, on the machine that runs it.

    Example: ctl replica logs smollm2-0 --lines 20
    """
    found = newest_logs(find_home(), replica)
    if not found:
        raise CtlError(run(_elsewhere(replica)))
    for log in found:
        if len(found) > 1:
            note(f"{log}:")
        with log.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, lines):
                say(line.rstrip("\n"))


def newest_logs(home: Home, replica: str) -> list[Path]:
    """The newest log of each shard of a replica that ran on this home's node; agent/supervisor.py names them."""
    if not home.agent_yaml.exists():
        return []
    directory = home.agent().data / "logs"
    shards = [path for path in _directories(directory) if path.name.rpartition(".")[0] == replica]
    newest = (max(shard.glob("*.log"), key=lambda log: log.stat().st_mtime_ns, default=None) for shard in shards)
    return [log for log in newest if log is not None]


async def _elsewhere(replica: str) -> str:
    state = await _fleet()
    record = state.replicas.get(replica)
    if record is None:
        known = ", ".join(sorted(state.replicas)) or "none"
        return f"no replica is named {replica}; there are: {known}"
    if not record.nodes:
        return f"replica {replica} has no log on this machine, and runs nowhere just now: it is {record.state}"
    nodes = ", ".join(record.nodes)
    return (
        f"replica {replica} has no log on this machine: it runs on {nodes}; look there in `logs/{replica}.0/` beneath "
        f"`data` of its agent.yaml"
    )


def _directories(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


async def _views() -> tuple[ReplicaView, ...]:
    session = await open_session()
    views = replica_views(await session.snapshot())
    starting = [view.id for view in views if view.state in (ReplicaState.PLACED, ReplicaState.STARTING)]
    told = await doing(session.client, session.cell, starting)
    return tuple(view.model_copy(update={"doing": told.get(view.id, "")}) for view in views)


async def _fleet() -> FleetState:
    return await (await open_session()).snapshot()

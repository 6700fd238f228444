"""`ctl node`: the machines of the fleet."""

import typer

from cli.console import JsonFlag, print_json, print_table, run
from cli.session import open_session
from cli.views import NODE_COLUMNS, node_row, node_views
from fleet.state import FleetState

app = typer.Typer(help="Nodes: the machines that serve.", no_args_is_help=True)


@app.callback()
def nodes() -> None:
    """Nodes: the machines that serve."""


@app.command("list")
def list_nodes(as_json: JsonFlag = False) -> None:
    """The nodes with what they have, what is free, and what runs there.

    Example: ctl node list
    """
    views = node_views(run(_fleet()))
    if as_json:
        print_json(views)
    else:
        print_table(NODE_COLUMNS, [node_row(view) for view in views], "no node has joined; start its agent, or ctl up")


async def _fleet() -> FleetState:
    return await (await open_session()).snapshot()

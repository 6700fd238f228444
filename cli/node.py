"""`ctl node`: the machines of the fleet, and closing or emptying one."""

import asyncio
from collections.abc import Callable
from typing import Annotated

import typer

from activities.contract import UPDATE_CORDON, UPDATE_DRAIN, UPDATE_UNCORDON, DrainArg, NameArg
from cli.command_trace import part, run_traced
from cli.console import JsonFlag, print_json, print_table, run, say
from cli.errors import CtlError
from cli.session import Session, open_session
from cli.views import NODE_COLUMNS, node_row, node_views
from fleet.facts import claims
from fleet.render import forced_sentence
from fleet.state import FleetState, ForcedEnd, NodeState, ReplicaRecord, ReplicaState

POLL_S = 0.5
"""Between two looks at a node that drains: each is the fleet's whole state."""

app = typer.Typer(help="Nodes: the machines that serve.", no_args_is_help=True)

NODE = Annotated[str, typer.Argument(metavar="NAME", help="The node's name, as `ctl node list` lists it.")]


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


@app.command()
def cordon(name: NODE) -> None:
    """Keep new replicas off a node. What runs there stays.

    Example: ctl node cordon n1
    """
    run_traced("node cordon", _asked(UPDATE_CORDON, name))


@app.command()
def uncordon(name: NODE) -> None:
    """Let new replicas onto a node again; this also ends a drain.

    Example: ctl node uncordon n1
    """
    run_traced("node uncordon", _asked(UPDATE_UNCORDON, name))


@app.command()
def drain(
    name: NODE,
    deadline: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="After so long, what could not be moved is stopped.")
    ] = 600.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the node is empty.")] = False,
) -> None:
    """Empty a node: what runs there is placed elsewhere first, then drained and stopped.

    Example: ctl node drain n1 --deadline 300
    """
    run_traced("node drain", _drained(name, deadline, wait=not no_wait))


async def wait_until_empty(session: Session, name: str, tell: Callable[[str], None]) -> None:
    """Say what still runs on a node, each time it changes, until nothing does. Raises CtlError if that ends early."""
    said = ""
    told: set[ForcedEnd] = set()
    while True:
        state = await session.state()
        node = state.nodes.get(name)
        for forced in state.forced:
            if node is not None and name in forced.nodes and forced.at >= node.since and forced not in told:
                tell(forced_sentence(forced))
                told.add(forced)
        left = claims(state, name)
        if node is None or node.state is NodeState.LOST:
            raise CtlError(f"node {name} was lost while it drained: {node.cause if node is not None else 'it is gone'}")
        if not left:
            tell(f"node {name} is empty")
            return
        if node.state is not NodeState.DRAINING:
            raise CtlError(f"node {name} is {node.state} now: somebody ended the drain")
        line = f"left on {name}: {', '.join(_brief(state, replica) for replica in left)}"
        if line != said:
            tell(line)
            said = line
        await asyncio.sleep(POLL_S)


async def _drained(name: str, deadline: float, *, wait: bool) -> None:
    session = await open_session()
    say((await session.update(UPDATE_DRAIN, DrainArg(name=name, deadline_s=deadline))).sentence)
    if not wait:
        return
    try:
        with part("wait until empty"):
            await wait_until_empty(session, name, say)
    except asyncio.CancelledError:
        say(f"the drain goes on: `ctl node list` shows it, `ctl node uncordon {name}` ends it")
        raise


async def _asked(update: str, name: str) -> None:
    say((await (await open_session()).update(update, NameArg(name=name))).sentence)


async def _fleet() -> FleetState:
    return await (await open_session()).state()


def _brief(state: FleetState, replica: ReplicaRecord) -> str:
    """`mine-0 serving (waits for room elsewhere: 0/2 nodes fit …)`."""
    model = state.models.get(replica.model)
    serves = replica.state is ReplicaState.SERVING
    why = f" (no room elsewhere: {model.waiting})" if model is not None and model.waiting and serves else ""
    return f"{replica.id} {replica.state}{why}"

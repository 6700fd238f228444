"""`ctl up`, `down`, `status`, `reconcile`: the system as a whole."""

import asyncio
from typing import Annotated, Any

import typer
from rich.text import Text
from temporalio.client import WorkflowHandle
from temporalio.exceptions import WorkflowAlreadyStartedError

from activities.contract import (
    CONTROL_QUEUE,
    RECONCILE_WORKFLOW,
    PassPlan,
    reconcile_id,
)
from cli.command_trace import run_traced
from cli.console import JsonFlag, note, out, print_json, print_table, run, say, table
from cli.embedded import PROBE_TIMEOUT, AskedPorts, down, up
from cli.errors import CtlError
from cli.home import Home, find_home
from cli.jobs import TASK_TIMEOUT
from cli.parts import STOP_ORDER
from cli.session import Session, fleet_state, open_session
from cli.views import (
    MODEL_COLUMNS,
    NODE_COLUMNS,
    ProcessView,
    StatusView,
    clock,
    forced_views,
    model_row,
    model_views,
    node_row,
    node_views,
    replica_views,
    waiting_views,
)
from fleet.state import FleetState
from fleet.steps import Step
from runtime.temporal import UnreachableError

FORCED_SHOWN = 5
"""Of the drains that ended by force, the last ones; `--json` has all that are kept."""

PASS_QUIET_S = 3.0
"""A pass takes a second or two; after this, ask whether anybody is there to run it."""
PASS_MORE_S = 23.0
"""More for a pass that has to wait for a worker that is being started: with the two questions, 30 s in all."""

TemporalPort = Annotated[int | None, typer.Option(envvar="LLMGW_PORT", min=1, max=65535, help="Of Temporal.")]
UiPort = Annotated[int | None, typer.Option(envvar="LLMGW_UI_PORT", min=1, max=65535, help="Of Temporal's web UI.")]
GatewayPort = Annotated[int | None, typer.Option(envvar="LLMGW_GATEWAY_PORT", min=1, max=65535, help="Of the gateway.")]


def start_system(port: TemporalPort = None, ui_port: UiPort = None, gateway_port: GatewayPort = None) -> None:
    """Start the embedded system on this machine; what runs already is left alone.

    Example: ctl up
    """
    home = find_home()
    started = run(up(home, AskedPorts(port, ui_port, gateway_port), say))
    say(f"up in {home.path}" if started.parts else f"was up already in {home.path}")


def stop_system() -> None:
    """Stop the embedded system and the engines on this machine. What was served is served again after `ctl up`.

    Example: ctl down
    """
    home = find_home()
    stopped = run(down(home, say))
    say("down" if stopped else f"nothing of it runs in {home.path}")


def show_status(as_json: JsonFlag = False) -> None:
    """Processes, addresses, nodes, models, and what waits and why. Exit code 1 where a part of the system is dead.

    Example: ctl status
    """
    view = run(_status(find_home()))
    if as_json:
        print_json(view)
        raise typer.Exit(int(view.broken))
    console = out()
    console.print(table(("PROCESS", "STATE", "PID", "LOG"), [_process_row(process) for process in view.processes]))
    say("")
    say(f"Temporal {view.temporal or 'is not running here'}")
    if view.ui:
        say(f"web UI   {view.ui}")
        say(f"gateway  {view.gateway}/v1")
    for process in view.died:
        say(f"{process.name} died: ./ctl up starts it again; {process.log} says why")
    if view.problem:
        say(view.problem)
        if view.broken:
            raise typer.Exit(1)
        return
    if view.brake:
        say("")
        console.print(Text(f"BRAKE: {view.brake}", style="bold red"))
        say("gone for good? `ctl fleet release-brake` places their replicas elsewhere")
    say("")
    print_table(NODE_COLUMNS, [node_row(node) for node in view.nodes], "no node has joined")
    say("")
    print_table(MODEL_COLUMNS, [model_row(model) for model in view.models], "no model is served")
    for waiting in view.waiting:
        say(f"{waiting.model} waits: {waiting.why}")
    for forced in view.forced[-FORCED_SHOWN:]:
        say(f"at {clock(forced.at)} {forced.sentence}")
    if view.broken:
        raise typer.Exit(1)


def reconcile(as_json: JsonFlag = False) -> None:
    """Run one pass now, and show what it does. The fleet also does this by itself when something changes.

    Example: ctl reconcile
    """
    plan = run_traced("reconcile", _reconcile())
    if as_json:
        print_json(plan.steps)
    else:
        columns = ("STEP", "MODEL", "REPLICA", "WHY", "WHERE")
        print_table(columns, [_step_row(step) for step in plan.steps], "nothing to do: the fleet is as it should be")


async def _reconcile() -> PassPlan:
    session = await open_session()
    pass_id = reconcile_id(session.cell)
    try:
        handle = await session.client.start_workflow(
            RECONCILE_WORKFLOW,
            {"cell": session.cell},
            id=pass_id,
            task_queue=CONTROL_QUEUE,
            task_timeout=TASK_TIMEOUT,
            static_summary="asked for by ctl",
            result_type=PassPlan,
        )
    except WorkflowAlreadyStartedError:
        note("a pass runs already; this is what it does")
        handle = session.client.get_workflow_handle(pass_id, result_type=PassPlan)
    return await ended_pass(session, handle)


async def ended_pass(
    session: Session, handle: WorkflowHandle[Any, PassPlan], quiet_s: float = PASS_QUIET_S, more_s: float = PASS_MORE_S
) -> PassPlan:
    """What a pass does, once it has ended. Raises CtlError where it does not end in time."""
    ended = asyncio.create_task(handle.result())
    try:
        await asyncio.wait({ended}, timeout=quiet_s)
        if not ended.done() and not await _fleet_answers(session):
            note(f"the control worker does not answer: {handle.id} goes on when it is back (./ctl up starts it)")
        await asyncio.wait({ended}, timeout=more_s)
        if not ended.done():
            if await _fleet_answers(session):
                raise CtlError(f"{handle.id} has not ended and goes on: look at it in Temporal's web UI")
            raise CtlError(
                f"the control worker does not answer: {handle.id} was started and stays, and goes on when it is back "
                f"(./ctl up starts it)"
            )
        return await ended
    finally:
        ended.cancel()


async def _fleet_answers(session: Session) -> bool:
    try:
        await fleet_state(session.client, session.cell, PROBE_TIMEOUT)
    except CtlError:
        return False
    return True


async def _status(home: Home) -> StatusView:
    system = home.system()
    fleet: FleetState | None = None
    problem = ""
    address = system.address if system is not None else ""
    try:
        session = await open_session()
        address = session.address
        fleet = await session.state()
    except (UnreachableError, CtlError) as error:
        problem = str(error)
    state = fleet or FleetState()
    models = model_views(state)
    return StatusView(
        home=str(home.path),
        processes=tuple(_process(home, name) for name in reversed(STOP_ORDER)),
        temporal=address,
        ui=system.ui_url if system is not None else "",
        gateway=system.gateway_url if system is not None else "",
        problem=problem,
        brake=state.brake,
        nodes=node_views(state),
        models=models,
        replicas=replica_views(state),
        waiting=waiting_views(models),
        forced=forced_views(state),
    )


def _process(home: Home, name: str) -> ProcessView:
    record = home.process(name)
    if record is None:
        return ProcessView(name=name, state="stopped", pid=0, log=str(home.log(name)))
    return ProcessView(name=name, state="running" if record.alive else "died", pid=record.pid, log=str(record.log))


def _process_row(view: ProcessView) -> tuple[str, ...]:
    return (view.name, view.state, str(view.pid) if view.pid else "", view.log)


def _step_row(step: Step) -> tuple[str, ...]:
    where = step.decision.sentence if step.decision is not None else ""
    return (step.kind, step.model, step.replica, step.reason, where)

"""ctl's way to Temporal, and what it asks Fleet."""

from dataclasses import dataclass
from datetime import timedelta

from pydantic import BaseModel
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import QUERY_SNAPSHOT, Done, Snapshot, fleet_id
from cli.command_trace import part
from cli.errors import CtlError, failure_of, sentence
from cli.home import Home, find_home
from fleet.state import FleetState
from runtime.temporal import UnreachableError, connect, connect_exactly

QUERY_TIMEOUT = timedelta(seconds=5)
"""A query takes milliseconds; one that takes longer has no worker to answer it."""


UPDATE_TIMEOUT = timedelta(seconds=10)
"""An update is answered in milliseconds; a worker that was killed just now costs some seconds."""


@dataclass(frozen=True)
class Session:
    """A connection, and the cell it is used for."""

    client: Client
    home: Home
    cell: str

    @property
    def address(self) -> str:
        """Of the Temporal that was reached."""
        return self.client.service_client.config.target_host

    async def state(self) -> FleetState:
        """The fleet as it is now."""
        return await fleet_state(self.client, self.cell)

    async def snapshot(self) -> Snapshot:
        """The same, with what the fleet's clock says."""
        return await fleet_snapshot(self.client, self.cell)

    async def update(self, name: str, wish: BaseModel | None = None) -> Done:
        """Ask Fleet for a change. Raises CtlError with the fleet's own sentence where it refuses."""
        handle = self.client.get_workflow_handle(fleet_id(self.cell))
        arguments = [] if wish is None else [wish]
        try:
            with part("tell fleet"):
                done: Done = await handle.execute_update(
                    name, args=arguments, result_type=Done, rpc_timeout=UPDATE_TIMEOUT
                )
        except WorkflowUpdateFailedError as error:
            failure = failure_of(error.cause)
            raise CtlError(failure.detail if failure is not None else sentence(error)) from error
        except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            raise _unanswered(self.cell, error) from error
        return done


async def open_session() -> Session:
    """Connect to where the operator's Temporal settings say, else to the embedded system. Raises UnreachableError."""
    home = find_home()
    system = home.system()
    with part("connect"):
        return Session(await connect(system.address if system else ""), home, home.cell())


async def open_embedded(home: Home, address: str) -> Session:
    """Connect to the embedded system, whatever the operator's Temporal settings say. Raises UnreachableError."""
    try:
        with part("connect"):
            client = await connect_exactly(address, "default")
    except UnreachableError as error:
        raise UnreachableError(f"the embedded Temporal does not answer at {address}: look at `ctl status`") from error
    return Session(client, home, home.cell())


async def fleet_state(client: Client, cell: str, timeout: timedelta = QUERY_TIMEOUT) -> FleetState:
    """Ask Fleet for its state. Raises CtlError as `fleet_snapshot`."""
    return (await fleet_snapshot(client, cell, timeout)).state


async def fleet_snapshot(client: Client, cell: str, timeout: timedelta = QUERY_TIMEOUT) -> Snapshot:
    """Ask Fleet. Raises CtlError when there is none, it has ended, or nobody answers for it."""
    handle = client.get_workflow_handle(fleet_id(cell))
    try:
        # One that was cancelled or terminated answers queries for ever, with the state it died with.
        status = (await handle.describe(rpc_timeout=timeout)).status
        if status is not None and status is not WorkflowExecutionStatus.RUNNING:
            raise CtlError(
                f"fleet {cell} is not running ({status.name}): restart the control worker (./ctl down && ./ctl up)"
            )
        answer: Snapshot = await handle.query(QUERY_SNAPSHOT, result_type=Snapshot, rpc_timeout=timeout)
    except RPCError as error:
        raise _unanswered(cell, error) from error
    except WorkflowQueryFailedError as error:
        raise CtlError(f"fleet {cell} cannot say how it is: {error}") from error
    return answer


def _unanswered(cell: str, error: Exception) -> CtlError:
    if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
        return CtlError(f"there is no fleet {cell} in this Temporal: start the control plane (`ctl up`)")
    return CtlError(f"fleet {cell} does not answer: its control worker is away (./ctl up starts what is missing)")

"""ctl's way to Temporal, and what it asks Fleet."""

from dataclasses import dataclass
from datetime import timedelta

from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import QUERY_SNAPSHOT, Snapshot, fleet_id
from cli.errors import CtlError
from cli.home import Home, find_home
from fleet.state import FleetState
from runtime.temporal import UnreachableError, connect, plugins

QUERY_TIMEOUT = timedelta(seconds=5)
"""A query takes milliseconds; one that takes longer has no worker to answer it."""


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

    async def snapshot(self) -> FleetState:
        """The fleet as it is now."""
        return await fleet_state(self.client, self.cell)


async def open_session() -> Session:
    """Connect to where the operator's Temporal settings say, else to the embedded system. Raises UnreachableError."""
    home = find_home()
    system = home.system()
    return Session(await connect(system.address if system else ""), home, home.cell())


async def open_embedded(home: Home, address: str) -> Session:
    """Connect to the embedded system, whatever the operator's Temporal settings say. Raises UnreachableError."""
    try:
        client = await Client.connect(address, namespace="default", plugins=plugins())
    except (RPCError, RuntimeError) as error:
        raise UnreachableError(f"the embedded Temporal does not answer at {address}: look at `ctl status`") from error
    return Session(client, home, home.cell())


async def fleet_state(client: Client, cell: str, timeout: timedelta = QUERY_TIMEOUT) -> FleetState:
    """Ask Fleet. Raises CtlError when there is none, or nobody answers for it."""
    handle = client.get_workflow_handle(fleet_id(cell))
    try:
        answer: Snapshot = await handle.query(QUERY_SNAPSHOT, result_type=Snapshot, rpc_timeout=timeout)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise CtlError(f"there is no fleet {cell} in this Temporal: start the control plane (`ctl up`)") from error
        raise CtlError(f"fleet {cell} does not answer: is its worker running? Look at `ctl status`") from error
    except WorkflowQueryFailedError as error:
        raise CtlError(f"fleet {cell} cannot say how it is: {error}") from error
    return answer.state

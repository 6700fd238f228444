"""Fleet's state, for activities that look at it."""

from collections.abc import Awaitable, Callable

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import QUERY_SNAPSHOT, Snapshot, fleet_id
from fleet.state import FleetState

FleetOf = Callable[[str], Awaitable[FleetState]]
"""Asks the Fleet of a cell."""


async def fleet_of(client: Client, cell: str) -> FleetState:
    """How a cell stands; one whose Fleet has not been started yet has no node."""
    handle = client.get_workflow_handle(fleet_id(cell))
    try:
        snapshot: Snapshot = await handle.query(QUERY_SNAPSHOT, result_type=Snapshot)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return FleetState(cell=cell)
        raise
    return snapshot.state

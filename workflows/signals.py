"""What one workflow tells another, and for how long it tries."""

from temporalio import workflow
from temporalio.exceptions import CancelledError, FailureError

from activities import contract
from fleet.facts import ReplicaEvent
from fleet.records import Record
from workflows.calls import short

SIGNAL_RETRY_MAX_S = 30.0


async def tell(workflow_id: str, signal: str, message: Record) -> bool:
    """Signal another workflow once; False when it does not run."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(signal, message)
    except CancelledError:
        raise
    except FailureError:
        return False
    return True


async def tell_surely(workflow_id: str, signal: str, message: Record, *, give_up_after_s: float | None = None) -> bool:
    """Signal another workflow until it takes it; False when it still does not run after `give_up_after_s`."""
    wait, deadline = 0.5, None if give_up_after_s is None else workflow.time() + give_up_after_s
    while not await tell(workflow_id, signal, message):
        if deadline is not None and workflow.time() >= deadline:
            return False
        await workflow.sleep(wait, summary=short(f"{workflow_id} does not run"))
        wait = min(SIGNAL_RETRY_MAX_S, wait * 2)
    return True


async def tell_fleet(cell: str, event: ReplicaEvent) -> None:
    """Tell Fleet about a replica, for as long as it takes: a lost event would leave a reservation for ever."""
    await tell_surely(contract.fleet_id(cell), "replica_changed", event)

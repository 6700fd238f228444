"""What came before an attempt to start a shard, as spans: the wait for the node, and an attempt cut short by a kill."""

import time
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError
from temporalio import activity

from activities.node_contract import StartProgress
from agent.spans import between

WAIT_FOR_NODE = "wait for node"
"""From the request, or from the last word of a killed agent, until an agent took it up."""
INTERRUPTED = "interrupted start"
"""An attempt whose own span died with its agent, as far as its heartbeats tell."""

_EPOCH = datetime.fromtimestamp(0, UTC)


def trace_wait(node: str, asked_ns: int) -> None:
    """Call it at the start of an activity, within the span that sent it; `asked_ns` as in `StartShard`."""
    info = activity.info()
    asked_ns = asked_ns or _ns(info.scheduled_time)
    last = _last_word()
    attributes: dict[str, str | int] = {"llmgw.node": node}
    if last is not None:
        phase = last.phase.value
        lost = {**attributes, "llmgw.attempt": info.attempt - 1, "llmgw.phase": phase}
        between(WAIT_FOR_NODE, asked_ns, last.began_ns, attributes)
        between(INTERRUPTED, last.began_ns, last.said_ns, lost, error=f"the agent of {node} ended during: {phase}")
        asked_ns = last.said_ns
    between(WAIT_FOR_NODE, asked_ns, time.time_ns(), attributes)


def _last_word() -> StartProgress | None:
    """The last heartbeat of the attempt before; None where there is none, or it says no times."""
    for detail in activity.info().heartbeat_details:
        try:
            found = StartProgress.model_validate(detail)
        except ValidationError:
            return None
        return found if found.began_ns and found.said_ns else None
    return None


def _ns(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000

"""What follows from a state, as tables."""

import pytest

from fleet.facts import ReplicaEvent, replica_changed
from fleet.reasons import Failure, Reason
from fleet.spec import Scaling
from fleet.standing import barred
from fleet.state import FleetState, ReplicaState
from fleet.wishes import remove, retry, scale
from tests.fleets import GIB, fleet, inventory, spec
from tests.test_planning import after, serving


def broken(reason: Reason, replicas: int = 1) -> FleetState:
    """The first replica of `m` failed on its way up; the others, if any, are still on theirs."""
    state = after(fleet({"n1": inventory()}, spec("m", replicas=replicas)))
    failure = Failure(reason=reason, detail="no such flag: --x", node="n1")
    event = ReplicaEvent(replica="m-0", generation=1, state=ReplicaState.FAILED, failure=failure)
    return replica_changed(state, event, 20.0)


ON_DEMAND = spec("m", replicas=0, scaling=Scaling(min=0, max=2))
GIVEN_UP = "its start was given up: no such flag: --x (on n1) — correct the engine arguments"


@pytest.mark.parametrize(
    ("state", "why"),
    [
        pytest.param(after(fleet({"n1": inventory()}, spec("m"))), "", id="on its way"),
        pytest.param(serving(after(fleet({"n1": inventory()}, spec("m")))), "", id="serves"),
        pytest.param(after(fleet({"n1": inventory()}, spec("m", memory=99 * GIB))), "", id="waits for room"),
        pytest.param(broken(Reason.EXITED), "", id="failed and is tried again"),
        pytest.param(broken(Reason.BAD_FLAG), GIVEN_UP, id="given up"),
        pytest.param(broken(Reason.BAD_FLAG, replicas=2), "", id="one given up, one on its way"),
        pytest.param(retry(broken(Reason.BAD_FLAG), "m", 30.0), "", id="given up and retried"),
        pytest.param(after(fleet({"n1": inventory()}, ON_DEMAND)), "", id="at zero, by demand"),
        pytest.param(
            scale(fleet({"n1": inventory()}, spec("m")), "m", 0),
            "0 replicas of m are wanted, and it has no scaling by demand",
            id="at zero, by the operator",
        ),
        pytest.param(
            remove(serving(after(fleet({"n1": inventory()}, spec("m")))), "m"), "m is being removed", id="removed"
        ),
    ],
)
def test_why_no_request_can_bring_a_replica(state: FleetState, why: str) -> None:
    assert barred(state, state.models["m"]) == why

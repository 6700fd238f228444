"""Nodes that lie: what contradicts itself is refused in one sentence, and whatever else they say breaks no plan."""

import pytest

from fleet.commits import commit
from fleet.facts import node_joined, node_measured
from fleet.measures import contradiction
from fleet.planning import plan
from fleet.reasons import RefusedError
from fleet.standing import oversold
from fleet.state import CPU, Device, FleetState, Inventory, ReplicaState
from tests.fleets import GIB, fleet, inventory, spec
from tests.test_planning import after, serving

TWIN = Device(uuid="GPU-0", model="H100", total=80 * GIB)


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        ((), ""),
        ((TWIN,), ""),
        ((Device(uuid=CPU, total=0), Device(uuid="GPU-0", total=2**70, foreign=2**71)), ""),
        ((TWIN, TWIN), "2 devices have the uuid GPU-0: give each its own, or memory would be counted 2 times"),
        (
            (Device(uuid="", total=1),),
            "a device has no uuid: what is placed on it could not be told from the others",
        ),
        ((Device(uuid=CPU, total=-1),), "device cpu has -1 bytes in all, which is less than nothing"),
    ],
)
def test_what_cannot_be_is_one_sentence(devices: tuple[Device, ...], sentence: str) -> None:
    assert contradiction(inventory(devices=devices)) == sentence


def test_a_node_that_contradicts_itself_may_not_join_and_a_member_keeps_its_last_measure() -> None:
    twins = inventory(devices=(TWIN, TWIN))
    with pytest.raises(RefusedError, match="node n1 may not join: 2 devices have the uuid GPU-0"):
        node_joined(FleetState(), "n1", "i1", twins, 1.0)
    member = fleet({"n1": inventory(gpus=(80 * GIB,))})
    assert node_measured(member, "n1", "i1", twins) is member


@pytest.mark.parametrize(
    "told",
    [
        inventory(devices=()),
        inventory(devices=(Device(uuid="GPU-0", model="MI300X", total=GIB),)),
        inventory(devices=(Device(uuid="GPU-0", total=0),)),
        inventory(devices=(Device(uuid="GPU-0", total=80 * GIB, foreign=2**62),)),
        inventory(devices=(Device(uuid="GPU-0", total=80 * GIB, foreign=-(2**62)),)),
        inventory(gpus=(80 * GIB,), disk=-GIB),
    ],
    ids=["gone", "another vendor", "no memory", "more held than there is", "less than none held", "disk below none"],
)
def test_what_serves_stays_and_nothing_is_sold_twice_whatever_a_node_says_next(told: Inventory) -> None:
    state = serving(after(fleet({"n1": inventory(gpus=(80 * GIB,))}, spec("m", memory=40 * GIB, gpus=1))))
    state = node_joined(state, "n1", "i0", told, 20.0)
    state = state.with_model(
        state.models["m"].model_copy(update={"spec": spec("m", memory=40 * GIB, gpus=1, replicas=3)})
    )
    planned = commit(state, plan(state, 21.0), 21.0)
    assert planned.replicas["m-0"].state is ReplicaState.SERVING
    assert oversold(state, planned) == ()
    assert plan(planned, 22.0).quiet


def test_memory_that_others_are_said_to_hold_below_nothing_adds_none() -> None:
    assert Device(uuid="GPU-0", total=GIB, foreign=-GIB).usable == GIB

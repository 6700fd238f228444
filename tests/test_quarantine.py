"""A node where something did not come back takes nothing new, says who holds it, and is let out by an operator."""

from cli.views import node_row, node_views
from fleet.commits import commit
from fleet.explain import explain
from fleet.facts import node_joined, node_measured
from fleet.planning import plan
from fleet.reasons import Reason
from fleet.state import FleetState, Outcome
from fleet.wishes import cordon
from tests.fleets import fleet, inventory, spec

HELD = "pid 77 (python) of old-0 still holds 40 GiB on GPU-0 30 s after its end"
OTHER = "pid 78 (python) outlives KILL: it is left of other-0"


def quarantined(sentence: str = HELD) -> FleetState:
    return fleet({"n1": inventory(quarantine=sentence)}, spec("m"))


def waiting(state: FleetState) -> str:
    return commit(state, plan(state, 10.0), 10.0).models["m"].waiting


def test_nothing_new_is_placed_on_it_and_each_door_names_the_holder() -> None:
    state = quarantined()
    assert waiting(state) == "0/1 nodes fit m: 1 node_quarantined"
    explanation = explain(state, state.models["m"])
    [verdict] = explanation.now.verdicts
    assert (verdict.outcome, verdict.reason) == (Outcome.EXCLUDED, Reason.NODE_QUARANTINED)
    [way] = explanation.ways
    assert way.sentence == f"free n1 of what keeps it in quarantine ({HELD}), or uncordon it"
    [view] = node_views(state)
    assert (view.state, view.cause) == ("quarantined", HELD)
    assert HELD in node_row(view)


def test_other_nodes_are_taken_instead() -> None:
    state = node_joined(quarantined(), "n2", "i1", inventory(), now=3.0)
    done = commit(state, plan(state, 10.0), 10.0)
    assert [replica.nodes for replica in done.replicas.values()] == [("n2",)]


def test_it_ends_when_the_node_says_so() -> None:
    state = node_measured(quarantined(), "n1", "i1", inventory())
    assert waiting(state) == ""
    assert node_views(state)[0].state == "ready"


def test_an_operator_lifts_it_and_another_one_counts_again() -> None:
    state = quarantined()
    lifted = cordon(state, "n1", False, 3.0)
    assert lifted.nodes["n1"].version > state.nodes["n1"].version, "a plan on the older one is refused"
    assert waiting(lifted) == ""
    assert cordon(lifted, "n1", False, 4.0) is lifted
    assert node_views(lifted)[0].state == "ready"
    again = node_measured(lifted, "n1", "i1", inventory(quarantine=OTHER))
    assert waiting(again) == "0/1 nodes fit m: 1 node_quarantined"
    back = node_measured(again, "n1", "i1", inventory())
    assert waiting(node_measured(back, "n1", "i1", inventory(quarantine=OTHER))) != ""


def test_a_cordon_comes_first_and_its_end_lifts_both() -> None:
    state = cordon(quarantined(), "n1", True, 3.0)
    assert waiting(state) == "0/1 nodes fit m: 1 node_cordoned"
    assert node_views(state)[0].state == "cordoned"
    assert waiting(cordon(state, "n1", False, 4.0)) == ""


def test_what_an_operator_should_know_of_a_node_is_shown_with_it() -> None:
    note = "the ledger was damaged, set aside as ledger.json.corrupt-1, and rebuilt from what runs"
    [view] = node_views(fleet({"n1": inventory(notes=(note,))}))
    assert (view.state, view.cause) == ("ready", note)

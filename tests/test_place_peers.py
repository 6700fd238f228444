"""The peers that a pass names to each start: from Fleet's snapshot and the pass's own steps; and the real thing."""

import functools
import json
from pathlib import Path

import pytest

from activities.place import pass_plan
from fleet.commits import commit
from fleet.facts import node_joined
from fleet.planning import plan
from fleet.state import FleetState, Inventory, NodeState
from tests.fleets import GIB, fleet, inventory, spec
from tests.system import system
from tests.waiting import until


def node(number: int, *held: str) -> Inventory:
    return inventory(memory=GIB + 1, peer_url=f"http://n{number}", weights=held)


def peers(state: FleetState) -> dict[str, tuple[str, ...]]:
    """By node, as the next pass names them."""
    starts = pass_plan(state, plan(state, 10.0)).starts.values()
    return {start.nodes[0]: start.shards[0].peers for start in starts}


def test_starts_of_one_pass_form_a_tree() -> None:
    state = fleet({f"n{number}": node(number) for number in range(6)}, spec("m", replicas=6))
    named = peers(state)
    assert sorted(len(one) for one in named.values()) == [0, 1, 1, 2, 2, 2]
    [root] = [name for name, asked in named.items() if not asked]
    assert all(asked[-1] == f"http://{root}" for asked in named.values() if asked)


def test_a_later_pass_goes_on_behind_those_that_started_before() -> None:
    state = fleet({"n0": node(0), "n1": node(1)}, spec("m", replicas=1))
    state = commit(state, plan(state, 10.0), 10.0)
    [first] = [replica.nodes[0] for replica in state.replicas.values()]
    record = state.models["m"]
    state = state.with_model(record.model_copy(update={"spec": spec("m", replicas=2), "version": record.version + 1}))
    assert set(peers(state).values()) == {(f"http://{first}",)}


def test_nodes_that_have_the_files_are_asked_unless_they_are_lost_or_serve_none() -> None:
    found = {"n0": node(0), "n1": node(1, "m-abc"), "n2": node(2, "m-abc"), "n4": node(4)}
    silent = inventory(memory=GIB - 1, weights=("m-abc",))
    state = fleet({**found, "n3": silent}, spec("m", replicas=5))
    lost = state.nodes["n2"].model_copy(update={"state": NodeState.LOST})
    named = peers(state.with_node(lost))
    assert named["n1"] == ()
    assert all(asked[0] == "http://n1" for name, asked in named.items() if name != "n1")
    assert "http://n2" not in {one for asked in named.values() for one in asked}


def test_one_fleet_may_have_nodes_that_know_nothing_of_peers() -> None:
    state = fleet({"n0": inventory(memory=GIB), "n1": inventory(memory=GIB)}, spec("m", replicas=2))
    assert set(peers(state).values()) == {()}
    state = node_joined(state, "n2", "i", inventory(memory=GIB, weights=("m-abc",)), now=3.0)
    assert set(peers(state).values()) == {()}


def written(spans: Path) -> bool:
    return spans.exists() and "fetch weights" in spans.read_text()


@pytest.mark.usefixtures("real_engine")
async def test_the_second_of_two_real_nodes_has_its_weights_from_the_first(tmp_path: Path) -> None:
    async with system(tmp_path / "system") as made:
        secret = made.home / "secret"
        secret.write_text("a secret of both nodes\n")
        weights = {"token_file": str(secret), "port": 0, "hub_cache": None}
        made.start_worker()
        for name in ("n1", "n2"):
            made.start_agent(name, weights=weights, memory="1GiB")
        await made.ready("n1", "n2")
        job = await made.serve(replicas=2, memory="700MiB")
        await job.result()
        await until(functools.partial(made.serves, 2), 60.0)
        outcomes = {}
        for name in ("n1", "n2"):
            spans = made.home / f"traces/{name}.jsonl"
            await until(functools.partial(written, spans), 10.0)
            for line in spans.read_text().splitlines():
                for scope in json.loads(line)["resourceSpans"][0]["scopeSpans"]:
                    for span in scope["spans"]:
                        if span["name"] == "fetch weights":
                            told = {one["key"]: one["value"] for one in span["attributes"]}
                            outcomes[name] = told["llmgw.weights.outcome"]["stringValue"]
        assert sorted(outcomes.values()) == ["mirror", "peer"]
        assert "a secret of both nodes" not in "".join(made.log(name) for name in ("n1", "n2", "worker"))

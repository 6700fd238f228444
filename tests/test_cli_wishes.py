"""What ctl asks of Fleet at once, against the real workflows: scale, retry, cordon, drain, the brake."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.contract import UPDATE_DRAIN, UPDATE_RETRY, DrainArg, NameArg
from activities.node_contract import ShardRef
from cli.errors import CtlError
from cli.home import Home
from cli.node import wait_until_empty
from cli.session import Session
from fleet.reasons import Failure, Reason
from fleet.spec import JobRequest
from fleet.state import NodeState, Policy, ReplicaState, RestartPolicy
from tests.control import Answers, Cell, control_plane
from tests.ctl import Ctl, ctl_of
from tests.fleets import GIB
from tests.light_node import LightNode
from tests.waiting import until


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    policy = Policy(restart=RestartPolicy(base_s=0.1, attempts=1))
    async with control_plane(client, policy=policy) as made:
        yield made


@pytest.fixture
def session(cell: Cell, tmp_path: Path) -> Session:
    return Session(cell.client, Home(tmp_path / "home"), cell.name)


@pytest.fixture
async def node(cell: Cell) -> AsyncIterator[LightNode]:
    async with cell.node("n1") as made:
        await made.join()
        yield made


@pytest.fixture
def ctl(cell: Cell, tmp_path: Path) -> Ctl:
    return ctl_of(cell, tmp_path / "ctl")


async def test_a_drain_waits_until_the_node_is_empty(cell: Cell, node: LightNode, session: Session) -> None:
    await cell.run({"repo": "file:/models/m.gguf", "name": "m"})
    said: list[str] = []
    done = await session.update(UPDATE_DRAIN, DrainArg(name=node.name, deadline_s=60))
    assert done.sentence == f"node {node.name} is being drained, in 60 s at the latest"
    waiting = asyncio.create_task(wait_until_empty(session, node.name, said.append))
    try:
        await until(lambda: bool(said), 20)
        assert said[0].startswith(f"left on {node.name}: m-0 serving")
        assert not waiting.done()
        async with cell.node("n2") as other:
            await other.join()
            await waiting
            assert said[-1] == f"node {node.name} is empty"
            state = await cell.state()
            assert state.nodes[node.name].state is NodeState.DRAINING
            assert {replica.nodes for replica in state.replicas.values()} == {(other.name,)}
    finally:
        waiting.cancel()


async def test_a_drain_that_somebody_ends_is_a_sentence(
    cell: Cell, node: LightNode, ctl: Ctl, session: Session
) -> None:
    await cell.run({"repo": "file:/models/m.gguf", "name": "m"})
    code, out, _ = await ctl.run("node", "drain", node.name, "--deadline", "60", "--no-wait")
    assert (code, out) == (0, f"node {node.name} is being drained, in 60 s at the latest\n")
    waiting = asyncio.create_task(wait_until_empty(session, node.name, lambda line: None))
    try:
        code, out, _ = await ctl.run("node", "uncordon", node.name)
        assert (code, out) == (0, f"node {node.name} is uncordoned\n")
        with pytest.raises(CtlError, match="is ready now: somebody ended the drain"):
            await asyncio.wait_for(waiting, 20)
    finally:
        waiting.cancel()


async def test_after_the_deadline_a_drain_ends_what_could_not_move(cell: Cell, node: LightNode, ctl: Ctl) -> None:
    await cell.run({"repo": "file:/models/m.gguf", "name": "m"})
    node.left_in_flight = 3
    code, out, err = await ctl.run("node", "drain", node.name, "--deadline", "0")
    assert code == 0, err
    cut = f"m-0 on {node.name} was ended with 3 requests in flight: the deadline of its drain came first"
    assert cut in out.splitlines()
    assert out.splitlines()[-1] == f"node {node.name} is empty"
    assert node.stopped == [ShardRef(replica="m-0", generation=1)]
    assert "m-0" not in (await cell.state()).replicas
    _, out, _ = await ctl.run("status")
    assert cut in out
    _, out, _ = await ctl.run("status", "--json")
    [forced] = json.loads(out)["forced"]
    assert (forced["replica"], forced["requests"], forced["sentence"]) == ("m-0", 3, cut)


async def test_a_model_that_scales_by_demand_is_not_scaled_by_hand(cell: Cell, node: LightNode, ctl: Ctl) -> None:
    await cell.run({"repo": "file:/models/m.gguf", "name": "m", "scaling": {"min": 1, "max": 3}})
    code, _, err = await ctl.run("model", "scale", "m", "2")
    assert code == 1
    assert "model m scales by demand, between 1 and 3 replicas: serve it again with other --min and --max" in err
    assert (await cell.state()).models["m"].spec.replicas == 1


async def test_retry_starts_what_was_given_up(cell: Cell, node: LightNode, session: Session, ctl: Ctl) -> None:
    await cell.run({"repo": "file:/models/m.gguf", "name": "m"})
    failure = Failure(reason=Reason.EXITED, detail="it broke", node=node.name)
    await node.report_exit(ShardRef(replica="m-0", generation=1), failure)
    await cell.replica("m-0", ReplicaState.FAILED)
    _, out, _ = await ctl.run("model", "explain", "m")
    assert "given up: exited: it broke" in out
    done = await session.update(UPDATE_RETRY, NameArg(name="m"))
    assert done.sentence == "m is tried again"
    await cell.replica("m-0", ReplicaState.SERVING, generation=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model", "scale", "nobody", "2"), "no model is named nobody; there are: none"),
        (("model", "retry", "nobody"), "no model is named nobody; there are: none"),
        (("node", "cordon", "nowhere"), "no node is named nowhere; there are: "),
        (("node", "uncordon", "nowhere"), "no node is named nowhere; there are: "),
        (("node", "drain", "nowhere"), "no node is named nowhere; there are: "),
    ],
)
async def test_what_fleet_refuses_is_one_sentence(ctl: Ctl, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = await ctl.run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"ctl: {says}")
    assert len(err.splitlines()) == 1


async def test_the_brake_is_shown_and_released(client: Client, tmp_path: Path) -> None:
    policy = Policy(mass_loss_share=0.4)
    async with control_plane(client, policy=policy, answers=Answers(memory=GIB)) as cell:
        ctl = ctl_of(cell, tmp_path / "ctl")
        code, out, _ = await ctl.run("fleet", "release-brake")
        assert (code, out) == (0, "the brake was not on\n")
        async with cell.node("n1") as first:
            await first.join()
            async with cell.node("n2") as second:
                await second.join()
                await until(lambda: second.attending.is_set())

            async def braked() -> str:
                return (await cell.state()).brake

            brake = await until(braked, 30)
            code, out, _ = await ctl.run("status")
            assert f"BRAKE: {brake}" in out
            code, out, _ = await ctl.run("status", "--json")
            assert json.loads(out)["brake"] == brake
            code, out, _ = await ctl.run("fleet", "release-brake")
            assert (code, out) == (0, f"the brake is released ({brake})\n")
            assert await braked() == ""


async def test_without_a_fleet_an_update_says_so(client: Client, tmp_path: Path) -> None:
    session = Session(client, Home(tmp_path), "absent")
    with pytest.raises(CtlError, match="there is no fleet absent in this Temporal"):
        await session.update(UPDATE_RETRY, NameArg(name="m"))


async def test_serving_goes_to_ctls_own_cell(cell: Cell, node: LightNode, ctl: Ctl) -> None:
    options = ("--min", "0", "--max", "3", "--prefer", "zone=a", "--max-unavailable", "1", "--recreate")
    code, _, err = await ctl.run("model", "serve", "file:/models/m.gguf", "--name", "m", *options)
    assert code == 0, err
    request = (await cell.state()).models["m"].spec.request
    assert request == JobRequest.model_validate(
        {
            "cell": cell.name,
            "repo": "file:/models/m.gguf",
            "name": "m",
            "constraints": {"prefer": {"zone": "a"}},
            "scaling": {"min": 0, "max": 3},
            "rollout": {"max_unavailable": 1, "recreate": True},
        }
    )

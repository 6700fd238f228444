"""The kinds of jobs by ctl: serve, mirror, update, remove and cancel, as a person or a script runs them."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from temporalio.client import Client

from activities.contract import JobState, JobStatus
from activities.node_contract import StartShard
from cli.__main__ import app
from cli.model_options import WishOptions, wish
from fleet.inputs import updated
from fleet.spec import JobKind, JobRequest, Rollout, Scaling
from tests.control import Cell, control_plane
from tests.ctl import Ctl, ctl_of
from tests.fleets import GIB


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    async with control_plane(client) as made:
        yield made


@pytest.fixture
def ctl(cell: Cell, tmp_path: Path) -> Ctl:
    return ctl_of(cell, tmp_path / "home")


def test_a_wish_says_what_was_given_and_no_more() -> None:
    given: dict[str, object] = {"name": "m", "replicas": None, "max": 3, "labels": None, "recreate": True, "args": None}
    request = wish(JobKind.UPDATE, None, given)
    assert request == JobRequest(kind=JobKind.UPDATE, name="m", scaling=Scaling(max=3), rollout=Rollout(recreate=True))
    assert request.model_dump(mode="json", exclude_unset=True) == {
        "kind": "update",
        "name": "m",
        "scaling": {"max": 3},
        "rollout": {"recreate": True},
    }
    assert wish(JobKind.SERVE, "org/name", {}, wait_for_room=True).room_deadline_s is None
    with pytest.raises(typer.BadParameter, match="repo is empty"):
        wish(JobKind.SERVE, " ", {})


def test_serve_and_update_take_the_same_options_about_a_model() -> None:
    own = [field.name for field in fields(WishOptions)]
    ours = {name: _parameters(name) for name in ("serve", "update")}
    assert ours == {
        "serve": ["repo", "name", *own, "wait_for_room", "no_wait", "as_json"],
        "update": ["name", "repo", *own, "wait_for_room", "no_wait", "as_json"],
    }
    said = WishOptions(minimum=1, maximum=3, idle_after=9.0, label=["zone=a"], prefer=["disk=ssd"], arg=["a=1"], gpus=2)
    request = wish(JobKind.UPDATE, None, {"name": "m", **said.given()})
    assert request.model_dump(mode="json", exclude_unset=True) == {
        "kind": "update",
        "name": "m",
        "gpus": 2,
        "args": ["a=1"],
        "constraints": {"labels": {"zone": "a"}, "prefer": {"disk": "ssd"}},
        "scaling": {"min": 1, "max": 3, "idle_after_s": 9.0},
    }
    assert wish(JobKind.UPDATE, None, {"name": "m", **WishOptions().given()}) == JobRequest(
        kind=JobKind.UPDATE, name="m"
    )


def test_an_empty_value_takes_away_what_was_there() -> None:
    before = JobRequest.model_validate(
        {"repo": "o/n", "args": ["bad"], "constraints": {"labels": {"zone": "a"}, "prefer": {"d": "s"}, "role": "big"}}
    )
    said = WishOptions(arg=[""], label=[""], role="")
    after = updated(before, wish(JobKind.UPDATE, None, {"name": "m", **said.given()}))
    assert after.args == ()
    assert (after.constraints.labels, after.constraints.role) == ({}, "")
    assert after.constraints.prefer == {"d": "s"}, "what was not given keeps its value"
    with pytest.raises(typer.BadParameter, match="'' is not KEY=VALUE"):
        WishOptions(label=["", "zone=a"]).given()


def _parameters(command: str) -> list[str]:
    found = typer.main.get_command(app)
    for name in ("model", command):
        found = found.get_command(typer.Context(found), name)  # type: ignore[attr-defined]
    return [str(parameter.name) for parameter in found.params if parameter.name != "help"]


async def test_serve_update_mirror_and_remove(cell: Cell, ctl: Ctl) -> None:
    async with cell.node("n1") as node:
        await node.join()
        code, out, err = await ctl.run("model", "serve", "org/name", "--name", "m", "--priority", "70", "--json")
        assert code == 0, err
        served = JobStatus.model_validate_json(out)
        assert served.result is not None
        assert served.result.replicas == ("m-0",)
        assert "✓ smoke test: done" in err
        code, out, _ = await ctl.run("model", "update", "m", "--context-length", "4096")
        assert (code, out.splitlines()[0]) == (0, f"m is serving: 1 replica on {node.name}")
        spec = (await cell.state()).models["m"].spec
        assert (spec.priority, spec.context_length, spec.request and spec.request.repo) == (70, 4096, "org/name")
        code, out, _ = await ctl.run("model", "mirror", "org/other:Q4_0")
        assert (code, out) == (0, "other-q4_0: copied 1 GiB in 2.0 s (512 MiB/s)\n")
        code, out, err = await ctl.run("model", "remove", "m", "--weights")
        assert (code, out.splitlines()[-1].endswith("1 GiB are deleted from the mirror")) == (0, True), (out, err)
        code, out, err = await ctl.run("model", "update", "m", "--replicas", "2", "--json")
        assert (code, json.loads(out)["failure"]["reason"]) == (1, "bad_input")
        assert err.splitlines()[-1].startswith("ctl: failed at registry: no model is named m; there are: none")


async def test_cancel(cell: Cell, ctl: Ctl) -> None:
    starting = asyncio.Event()

    async def slow(request: StartShard) -> None:
        starting.set()
        await asyncio.Event().wait()

    async with cell.node("n1", start=slow) as node:
        await node.join()
        code, job, _ = await ctl.run("model", "serve", "org/name", "--name", "m", "--no-wait")
        job = job.strip()
        await asyncio.wait_for(starting.wait(), 30)
        code, out, _ = await ctl.run("model", "job", "cancel", job)
        assert (code, out) == (0, f"{job} is cancelled at placement\n")
        code, out, _ = await ctl.run("model", "job", "--json", job)
        assert (code, JobStatus.model_validate_json(out).state) == (0, JobState.CANCELLED)
        code, out, _ = await ctl.run("model", "job", "cancel", job)  # again: it is as it was asked for
        assert (code, out) == (0, f"{job} is cancelled at placement\n")
        code, _, err = await ctl.run("model", "job", "cancel", "job/serve/none/1")
        assert (code, err) == (1, "ctl: there is no job job/serve/none/1: `ctl model jobs` lists those there are\n")


async def test_what_is_over_cannot_be_cancelled_and_no_room_is_said(cell: Cell, ctl: Ctl) -> None:
    async with cell.node("n1", memory=GIB // 2) as node:
        await node.join()
        job = await cell.start({"repo": "org/name", "name": "m", "room_deadline_s": 0})
        with pytest.raises(Exception, match="Workflow execution failed"):
            await job.result()
        code, _, err = await ctl.run("model", "job", "cancel", job.id)
        assert (code, err) == (1, f"ctl: job {job.id} is over (failed): there is nothing to cancel\n")
        code, out, _ = await ctl.run("model", "job", job.id)
        assert out.splitlines()[-1].startswith("failed: 0/1 nodes fit m: 1 memory (need 1 GiB, best free 512 MiB on")

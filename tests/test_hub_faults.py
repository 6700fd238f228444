"""A whole job against a stub hub that fails: the hub's real client, the real registry and mirror, real workflows."""

import asyncio
import functools
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError

from activities import contract
from activities.contract import JobState, StepState
from activities.elsewhere import Elsewhere
from activities.mirror import Mirror
from activities.registry import Registry
from activities.resolutions import DIRECTORY, Resolutions
from activities.snapshots import fleet_of
from fleet.reasons import Reason
from runtime.config import HubConfig, MirrorConfig
from tests.control import Answers, Cell, control_plane
from tests.ctl import ctl_of
from tests.stub_hub import COMMIT, Fault, Hub, stub_hub
from tests.waiting import until

GGUF = b"GGUF" + bytes(range(256)) * 512
FILES = {"m-00001-of-00002.gguf": GGUF, "m-00002-of-00002.gguf": GGUF[::-1]}
REPO: dict[str, Any] = {"kind": "mirror", "repo": "org/name", "name": "m"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stub_hub(FILES) as served:
        yield served


@pytest.fixture
async def cell(client: Client, hub: Hub, tmp_path: Path) -> AsyncIterator[Cell]:
    config = HubConfig(endpoint=hub.url)
    answers = Answers()
    mirror = Mirror(MirrorConfig(path=tmp_path / "mirror", keep_free=0), config)
    kept = Resolutions((tmp_path / "mirror").as_uri())
    elsewhere = Elsewhere(kept, functools.partial(fleet_of, client))
    answers.resolve_model = Registry(config, elsewhere).resolve_model  # type: ignore[method-assign]
    answers.mirror_model = mirror.mirror_model  # type: ignore[method-assign]
    async with control_plane(client, answers=answers) as made:
        yield made


def left(tmp_path: Path) -> list[str]:
    """Names in the mirror beside locks, which are empty, and what the registry keeps."""
    files = [path for path in sorted((tmp_path / "mirror").rglob("*")) if path.is_file()]
    return [path.name for path in files if DIRECTORY not in path.parts and path.suffix != ".lock"]


async def failed(cell: Cell, request: dict[str, Any]) -> ApplicationError:
    with pytest.raises(WorkflowFailureError) as caught:
        await cell.run(request)
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("api", 2, status=500)],
        [Fault("api", status=429, headers={"Retry-After": "1"})],
        [Fault("resolve", 2, status=500)],
        [Fault("resolve", 1, status=429, headers={"Retry-After": "1"})],
        [Fault("resolve", cut_after=1000)],
        [Fault("resolve", flip=True)],
    ],
    ids=["500", "429", "500 of a file", "429 of a file", "cut", "wrong bytes of the right size"],
)
async def test_what_passes_is_tried_again(cell: Cell, hub: Hub, tmp_path: Path, faults: list[Fault]) -> None:
    hub.faults.extend(faults)
    result = await cell.run(REPO)
    assert result.sentence.startswith("m: copied ")  # what was wrong was copied twice
    (one, two) = (path for path in sorted((tmp_path / "mirror").rglob("*.gguf")))
    assert (one.read_bytes(), two.read_bytes()) == tuple(FILES.values())


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        (Fault("api", 99, status=401), Reason.REPO_FORBIDDEN, "answers 401 for org/name: no token was sent"),
        (Fault("api", 99, status=403), Reason.REPO_FORBIDDEN, "answers 403 for org/name"),
        (Fault("api", 99, status=404), Reason.REPO_NOT_FOUND, "org/name is not on"),
        (Fault("resolve", 99, status=403), Reason.REPO_FORBIDDEN, "403 for m-0000"),
        (Fault("resolve", 99, status=404), Reason.WEIGHTS_MISSING, "m-0000"),
    ],
)
async def test_what_does_not_pass_fails_at_once(
    cell: Cell, hub: Hub, tmp_path: Path, fault: Fault, reason: Reason, says: str
) -> None:
    hub.faults.append(fault)
    error = await failed(cell, REPO)
    assert (error.type, says in error.message) == (reason, True), error.message
    assert "secret-in-the-body" not in error.message
    assert left(tmp_path) == []


async def test_a_shard_that_is_missing_is_named(cell: Cell, hub: Hub) -> None:
    del hub.files["m-00002-of-00002.gguf"]
    error = await failed(cell, REPO)
    assert (error.type, "1 of 2 shards are there" in error.message) == (Reason.NO_WEIGHTS, True)


async def test_a_wait_that_the_hub_asks_for_is_shown(cell: Cell, hub: Hub) -> None:
    hub.faults.append(Fault("api", status=429, headers={"Retry-After": "3"}))
    job = await cell.start(REPO)

    async def shown() -> bool:
        return "it asks to wait 3 s" in (await cell.status(job)).steps[0].detail

    await until(shown, 20.0)
    await job.result()
    assert (await cell.status(job)).steps[0].detail.startswith(f"hf:org/name at {COMMIT[:12]}")


async def test_a_hub_that_goes_away_after_the_mirror_has_it_is_no_hindrance(cell: Cell, hub: Hub) -> None:
    await cell.run(REPO)
    hub.faults.append(Fault("api", 99, status=500))
    job = await cell.start(REPO)
    assert (await job.result()).sentence == "m: already mirrored, 256 KiB"
    assert "answers 500 for org/name: the mirror has it as it was on" in (await cell.status(job)).steps[0].detail


async def test_ctl_says_how_far_a_transfer_is(cell: Cell, hub: Hub, tmp_path: Path) -> None:
    hold = threading.Event()
    hub.faults.append(Fault("resolve", hold=hold, path=min(FILES)))
    ctl = ctl_of(cell, tmp_path / "home")
    try:
        job = await cell.start(REPO)

        async def told() -> str:
            code, out, _ = await ctl.run("model", "job", job.id, "--json")
            return str(json.loads(out)["steps"][1]["progress"]) if code == 0 else ""

        said = await until(told, 30.0)
        assert re.match(r"\d+(\.\d)? (B|KiB) of 256 KiB", said), said
        _, out, _ = await ctl.run("model", "job", job.id)
        assert "of 256 KiB" in out
    finally:
        hold.set()
    await job.result()
    _, out, _ = await ctl.run("model", "job", job.id, "--json")
    assert json.loads(out)["steps"][1]["progress"] == ""


@pytest.mark.parametrize(("where", "step"), [("api", 0), ("resolve", 1)])
async def test_a_job_is_cancelled_while_the_hub_hangs(
    cell: Cell, hub: Hub, tmp_path: Path, where: Any, step: int
) -> None:
    hold = threading.Event()
    hub.faults.append(Fault(where, hold=hold))
    try:
        job = await cell.start(REPO)

        async def hangs() -> bool:
            running = (await cell.status(job)).steps[step].state is StepState.RUNNING
            return running and bool(hub.asked("/api/" if where == "api" else "/resolve/"))

        await until(hangs, 20.0)
        await job.cancel()
        with pytest.raises(WorkflowFailureError) as caught:
            await asyncio.wait_for(job.result(), 30)
        assert isinstance(caught.value.cause, CancelledError)
        assert (await cell.status(job)).state is JobState.CANCELLED
        await until(lambda: left(tmp_path) == [], 20.0)
    finally:
        hold.set()
    assert contract.STEPS[step] in ("registry", "mirror")

"""The mirror: copies once, verifies, shows progress, and leaves nothing half done."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from temporalio.testing import ActivityEnvironment

from activities.contract import MirrorRequest, MirrorResult, ResolveRequest
from activities.mirror import Mirror
from activities.registry import Registry
from fleet.progress import Pace, Progress
from fleet.reasons import Reason, StepError
from fleet.repos import weights_id
from fleet.spec import Format, ModelFile, ResolvedModel
from runtime.config import HubConfig, MirrorConfig
from runtime.transfer import verified
from tests.stub_hub import Fault, Hub, stub_hub
from tests.waiting import until

GGUF = bytes(range(256)) * 20_000
NO_HUB = HubConfig(endpoint="http://127.0.0.1:9")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stub_hub({"m.gguf": GGUF}) as served:
        yield served


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def mirror(store: Path, hub: HubConfig = NO_HUB) -> Mirror:
    return Mirror(MirrorConfig(path=store, keep_free=ByteSize(0)), hub)


async def resolve(repo: str, config: HubConfig = NO_HUB) -> ResolvedModel:
    found: ResolvedModel = await ActivityEnvironment().run(Registry(config).resolve_model, ResolveRequest(repo=repo))
    return found


async def run(each: Mirror, resolved: ResolvedModel, env: ActivityEnvironment | None = None) -> MirrorResult:
    result: MirrorResult = await (env or ActivityEnvironment()).run(each.mirror_model, MirrorRequest(resolved=resolved))
    return result


async def test_from_a_file_to_verified_bytes(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    resolved = await resolve(str(path))
    result = await run(mirror(store), resolved)
    assert (result.outcome, result.copied_bytes) == ("copied", len(GGUF))
    assert result.weights.model_id == weights_id(resolved)
    assert result.weights.mirror == (store / weights_id(resolved)).as_uri()
    assert [(file.path, len(file.sha256), file.url) for file in result.weights.files] == [("m.gguf", 64, "")]
    assert verified(store / weights_id(resolved), result.weights.files)
    again = await run(mirror(store), resolved)
    assert (again.outcome, again.copied_bytes, again.weights) == ("already mirrored", 0, result.weights)


async def test_from_a_hub_with_its_token(hub: Hub, store: Path, tmp_path: Path) -> None:
    hub.token = "hf_very_secret"
    token = tmp_path / "token"
    token.write_text("hf_very_secret")
    config = HubConfig(endpoint=hub.url, token_file=token)
    result = await run(mirror(store, config), await resolve("org/name", config))
    assert hub.asked("resolve")[-1]["authorization"] == "Bearer hf_very_secret"
    assert "secret" not in result.model_dump_json()
    assert (store / result.weights.model_id / "m.gguf").read_bytes() == GGUF


async def test_token_does_not_go_to_another_host(hub: Hub, store: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_very_secret")
    config = HubConfig(endpoint=f"{hub.url}0", token_file=token)
    await run(mirror(store, config), await resolve(f"{hub.url}/m.gguf"))
    assert all("authorization" not in headers for headers in hub.asked("m.gguf"))


async def test_wrong_bytes_are_found(hub: Hub, store: Path) -> None:
    config = HubConfig(endpoint=hub.url)
    resolved = await resolve("org/name", config)
    hub.files["m.gguf"] = GGUF[::-1]
    with pytest.raises(StepError) as caught:
        await run(mirror(store, config), resolved)
    assert caught.value.failure.reason is Reason.WEIGHTS_CORRUPT
    assert not (store / weights_id(resolved)).exists()


async def test_hostile_path_makes_nothing(store: Path) -> None:
    resolved = ResolvedModel(
        repo="hf:a/b",
        revision="c",
        format=Format.GGUF,
        entry="../x",
        files=(ModelFile(path="../x", size=1),),
    )
    with pytest.raises(StepError) as caught:
        await run(mirror(store), resolved)
    assert caught.value.failure.reason is Reason.BAD_INPUT
    assert not store.exists()


async def test_index_that_names_an_absent_shard(hub: Hub, store: Path) -> None:
    config = HubConfig(endpoint=hub.url)
    shard = "model-00001-of-00002.safetensors"
    index: dict[str, Any] = {"weight_map": {"a": shard, "b": "model-00002-of-00002.safetensors"}}
    hub.files = {"config.json": b"{}", shard: b"x", INDEX: json.dumps(index).encode()}
    with pytest.raises(StepError) as caught:
        await run(mirror(store, config), await resolve("org/name", config))
    assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
    assert "names 'model-00002-of-00002.safetensors'" in caught.value.failure.detail


async def test_heartbeats_carry_progress_and_a_cancel_cleans_up(hub: Hub, store: Path) -> None:
    hold = threading.Event()
    hub.faults.append(Fault("resolve", 1, hold=hold, since=1))
    config = HubConfig(endpoint=hub.url)
    resolved = await resolve("org/name", config)
    beats: list[Progress] = []
    env = ActivityEnvironment()
    env.on_heartbeat = lambda *details: beats.append(details[0])
    task = asyncio.ensure_future(run(mirror(store, config), resolved, env))
    try:
        await until(lambda: beats and beats[-1].done_bytes > 0)
        assert beats[0] == Progress(said="0 B of 4.9 MiB", total_bytes=len(GGUF))
        env.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        hold.set()
    assert {path.name for path in store.iterdir()} == {f"{weights_id(resolved)}.lock", ".reserve.lock"}


def test_the_rate_is_that_of_the_last_seconds() -> None:
    mib = 1024**2
    pace = Pace(4096 * mib)
    assert pace.progress() == Progress(said="0 B of 4 GiB", total_bytes=4096 * mib)
    pace.saw(0, 4096 * mib, 100.0)
    pace.saw(60 * mib, 4096 * mib, 100.25)
    assert pace.progress().said == "60 MiB of 4 GiB", "too early for a rate"
    for moment in range(1, 11):
        pace.saw(moment * 300 * mib, 4096 * mib, 100.0 + moment)
    assert pace.progress() == Progress(
        said="2.9 GiB of 4 GiB, 300 MiB/s",
        done_bytes=3000 * mib,
        total_bytes=4096 * mib,
        bytes_per_s=300 * mib,
    )
    for moment in range(11, 17):
        pace.saw(3000 * mib, 4096 * mib, 100.0 + moment)
    assert pace.progress().bytes_per_s == 0, "a line that has stopped is not fast on the average"

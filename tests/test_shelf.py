"""The mirror in an object store, on a real server of the S3 protocol in a process of its own."""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from pydantic import ByteSize
from temporalio.testing import ActivityEnvironment

from activities.check import mirrored_shape
from activities.contract import MirrorRequest, MirrorResult, ResolveRequest
from activities.elsewhere import Elsewhere
from activities.mirror import Mirror
from activities.registry import AWAY_AFTER, Registry
from activities.resolutions import DIRECTORY, Resolutions
from agent.peers import PeerServer
from agent.weights import WeightStore
from fleet.reasons import Reason, StepError
from fleet.spec import Format, ModelFile, ResolvedModel
from fleet.state import FleetState
from runtime.config import HubConfig, MirrorConfig, WeightsConfig
from runtime.manifest import MANIFEST
from runtime.shelf import PROOFS
from tests.fleets import fleet, inventory
from tests.ggufs import gguf
from tests.stub_hub import Fault, Hub, stub_hub
from tests.system import free_ports
from tests.transfers import MIB, content
from tests.waiting import until

FIRST = gguf()
DATA = {"a dir/100%.gguf": FIRST, "m-2.gguf": content("large", 20 * MIB)}
SIZE = sum(map(len, DATA.values()))
KEY = "never-in-a-result"
SECRET = "a secret of the fleet"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server with a bucket; its address."""
    port = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"

    async def up() -> None:
        async with httpx.AsyncClient() as client:

            async def answers() -> bool:
                try:
                    return (await client.put(f"{address}/bucket")).status_code == 200
                except httpx.HTTPError:
                    return False

            await until(answers, 60.0)

    try:
        asyncio.run(up())
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def corner(request: pytest.FixtureRequest) -> str:
    """A corner of the bucket that is this test's own."""
    return f"{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}/x y"


@pytest.fixture
def mirror(s3: str, corner: str, monkeypatch: pytest.MonkeyPatch) -> Mirror:
    """A mirror there; credentials come from the environment."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": KEY,
    }.items():
        monkeypatch.setenv(name, value)
    return Mirror(MirrorConfig(url=f"s3://bucket/{corner}"), HubConfig(endpoint="http://127.0.0.1:9"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stub_hub(DATA) as served:
        yield served


def resolved(hub: Hub, *, hashes: bool = True) -> ResolvedModel:
    base = f"{hub.url}/org/name/resolve/0123456789abcdef0123456789abcdef01234567"
    files = tuple(
        ModelFile(
            path=path,
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest() if hashes else "",
            url=f"{base}/{path.replace(' ', '%20').replace('100%', '100%25')}",
        )
        for path, data in DATA.items()
    )
    return ResolvedModel(
        repo="hf:org/name", revision="0123456789abcdef", format=Format.GGUF, entry=files[0].path, files=files
    )


async def run(mirror: Mirror, model: ResolvedModel) -> MirrorResult:
    result: MirrorResult = await ActivityEnvironment().run(mirror.mirror_model, MirrorRequest(resolved=model))
    return result


def objects(s3: str, corner: str, query: str = "list-type=2") -> list[str]:
    """Keys beneath the mirror; with `uploads`, those whose upload was begun and neither ended nor given up."""
    text = httpx.get(f"{s3}/bucket?{query}").text
    keys = [key for key in re.findall(r"<Key>([^<]*)</Key>", text) if f"/{DIRECTORY}/" not in key]
    return sorted(key.removeprefix(corner) for key in keys if key.startswith(corner))


@pytest.mark.parametrize("hashes", [True, False])
async def test_a_model_goes_up_verified_and_comes_down_to_a_node(
    s3: str, corner: str, mirror: Mirror, hub: Hub, tmp_path: Path, hashes: bool
) -> None:
    model = resolved(hub, hashes=hashes)
    result = await run(mirror, model)
    assert (result.outcome, result.copied_bytes) == ("copied", SIZE)
    assert [file.sha256 for file in result.weights.files] == [
        hashlib.sha256(data).hexdigest() for data in DATA.values()
    ]
    name = result.weights.model_id
    assert objects(s3, corner) == [f"/{name}/{MANIFEST}", f"/{name}/a dir/100%.gguf", f"/{name}/m-2.gguf"]
    assert KEY not in result.model_dump_json()
    assert result.weights.hub == f"{hub.url}/org/name/resolve/0123456789abcdef0123456789abcdef01234567"

    again = await run(mirror, model)
    assert (again.outcome, again.copied_bytes, again.weights) == ("already mirrored", 0, result.weights)
    assert hub.given == SIZE

    one = result.weights.model_copy(update={"files": result.weights.files[:1]})
    assert mirrored_shape(one).architecture == "llama"

    store = WeightStore(tmp_path / "weights", 0, WeightsConfig(hub_cache=None))
    got = await store.bring(result.weights, lambda done, total: None)
    await store.close()
    assert (got.outcome, got.sources) == ("mirror", {"mirror": SIZE})
    assert all((got.directory / path).read_bytes() == data for path, data in DATA.items())

    await ActivityEnvironment().run(mirror.discard_weights, result.weights)
    assert objects(s3, corner) == []
    with pytest.raises(StepError) as caught:
        mirrored_shape(one)
    assert caught.value.failure.reason is Reason.WEIGHTS_MISSING


async def test_wrong_bytes_never_appear(s3: str, corner: str, mirror: Mirror, hub: Hub) -> None:
    model = resolved(hub)
    hub.faults.append(Fault("resolve", 99, flip=True, path="m-2.gguf"))
    with pytest.raises(StepError) as caught:
        await run(mirror, model)
    assert caught.value.failure.reason is Reason.WEIGHTS_CORRUPT
    assert caught.value.failure.detail.startswith("m-2.gguf has the SHA-256")
    assert not any("m-2" in key or MANIFEST in key for key in objects(s3, corner))
    assert objects(s3, corner, "uploads") == []
    hub.faults.clear()
    before = hub.given
    await run(mirror, model)
    assert hub.given - before == len(DATA["m-2.gguf"]), "the file that was right is not uploaded again"
    assert not any(PROOFS in key for key in objects(s3, corner))


async def test_a_cancelled_upload_leaves_no_part_of_a_file(s3: str, corner: str, mirror: Mirror, hub: Hub) -> None:
    hold = threading.Event()
    hub.faults.append(Fault("resolve", 99, hold=hold, path="m-2.gguf", since=12 * MIB))
    env = ActivityEnvironment()
    task = asyncio.ensure_future(env.run(mirror.mirror_model, MirrorRequest(resolved=resolved(hub))))
    try:
        await until(lambda: objects(s3, corner, "uploads"), 30.0)
        env.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        hold.set()
    assert objects(s3, corner, "uploads") == []
    assert not any("m-2" in key or MANIFEST in key for key in objects(s3, corner))


async def test_an_index_that_names_an_absent_shard_is_refused_before_the_shards(mirror: Mirror) -> None:
    index = json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}).encode()
    files = {"model-00001-of-00002.safetensors": b"x" * 100, "model.safetensors.index.json": index}
    with stub_hub(files) as hub:
        listing = tuple(ModelFile(path=path, size=len(data), url=f"{hub.url}/{path}") for path, data in files.items())
        model = ResolvedModel(repo="hf:a/b", revision="c", format=Format.SAFETENSORS, entry="", files=listing)
        with pytest.raises(StepError) as caught:
            await run(mirror, model)
        assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
        assert hub.asked("00001-of") == []


async def test_a_store_that_does_not_answer_is_named(hub: Hub, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StepError) as caught:
        await run(mirror, resolved(hub))
    assert caught.value.failure.reason is Reason.MIRROR_UNREACHABLE
    assert "s3://bucket/" in caught.value.failure.detail
    assert KEY not in caught.value.failure.detail


async def test_a_web_mirror_is_only_read(hub: Hub, tmp_path: Path) -> None:
    with stub_hub({}) as web:
        config = MirrorConfig(url=web.url)
        with pytest.raises(StepError) as caught:
            await run(Mirror(config, HubConfig()), resolved(hub))
        assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
        assert "only read" in caught.value.failure.detail
        # Filled by a worker that has it as a directory, it serves nodes.
        filled = await run(Mirror(MirrorConfig(path=tmp_path / "m", keep_free=0), HubConfig()), resolved(hub))
        name = filled.weights.model_id
        web.files = {f"{name}/{path}": data for path, data in DATA.items()}
        web.files[f"{name}/{MANIFEST}"] = (tmp_path / "m" / name / MANIFEST).read_bytes()
        found = await run(Mirror(config, HubConfig()), resolved(hub))
        assert (found.outcome, found.weights.mirror) == ("already mirrored", f"{web.url}/{name}")
        # Who filled it is not known: a hash that the hub does not publish is not taken from it.
        assert [bool(file.blake3) for file in filled.weights.files] == [True] * len(DATA)
        assert [file.blake3 for file in found.weights.files] == [""] * len(DATA)
        store = WeightStore(tmp_path / "weights", 0, WeightsConfig(hub_cache=None))
        got = await store.bring(found.weights, lambda done, total: None)
        await store.close()
        assert got.sources == {"mirror": SIZE}


async def test_a_model_in_a_store_is_resolved_and_mirrored(
    s3: str, corner: str, mirror: Mirror, tmp_path: Path
) -> None:
    at = f"s3://bucket/{corner}/source"
    async with httpx.AsyncClient() as client:
        for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf", "README.md"):
            put = await client.put(f"{s3}/bucket/{quote(corner)}/source/{name}", content=FIRST + name.encode())
            assert put.status_code == 200
    registry = Registry(HubConfig())
    for repo in (f"{at}/m-00001-of-00002.gguf", f"{at}/other.gguf"):
        asked = ResolveRequest(repo=repo)
        found = await ActivityEnvironment().run(registry.resolve_model, asked)
        local = Mirror(MirrorConfig(path=tmp_path / "mirror", keep_free=ByteSize(0)), HubConfig())
        copied = await ActivityEnvironment().run(local.mirror_model, MirrorRequest(resolved=found))
        names = [file.path for file in copied.weights.files]
        assert names == (["other.gguf"] if "other" in repo else ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"])
        for name in names:
            assert (tmp_path / "mirror" / copied.weights.model_id / name).read_bytes() == FIRST + name.encode()
        assert (await ActivityEnvironment().run(registry.resolve_model, asked)) == found
    for repo, reason in ((at, Reason.NO_WEIGHTS), (f"{at}/none", Reason.REPO_NOT_FOUND)):
        with pytest.raises(StepError) as caught:
            await ActivityEnvironment().run(registry.resolve_model, ResolveRequest(repo=repo))
        assert caught.value.failure.reason is reason


async def test_a_store_that_is_a_source_says_where_its_credentials_come_from(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StepError) as caught:
        await ActivityEnvironment().run(Registry(HubConfig()).resolve_model, ResolveRequest(repo="s3://bucket/m.gguf"))
    assert caught.value.failure.reason is Reason.HUB_UNREACHABLE
    assert "are those in the worker's environment, such as AWS_ENDPOINT_URL" in caught.value.failure.detail


async def test_the_hub_away_a_store_tells_what_it_has(corner: str, mirror: Mirror, hub: Hub, tmp_path: Path) -> None:
    at = f"s3://bucket/{corner}"
    store = WeightStore(tmp_path / "weights", 0, WeightsConfig(hub_cache=None), secret=SECRET)
    door = PeerServer(store.offers, SECRET)
    door.open("127.0.0.1", 0)
    state = FleetState()

    async def fleet_now(cell: str) -> FleetState:
        return state

    config = HubConfig(endpoint=hub.url)
    registry = Registry(config, Elsewhere(Resolutions(at), fleet_now, SECRET))
    with_secret = Mirror(MirrorConfig(url=at), config, SECRET)
    hub.files = {"m.gguf": DATA["m-2.gguf"]}

    async def resolve() -> ResolvedModel:
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, attempt=AWAY_AFTER)
        found: ResolvedModel = await environment.run(registry.resolve_model, ResolveRequest(repo="org/name"))
        return found

    try:
        weights = (await run(with_secret, await resolve())).weights
        await store.bring(weights, lambda done, total: None)
        await store.close()
        hub.faults.extend((Fault("api", 999, status=500), Fault("resolve", 999, status=500)))
        assert "the mirror has it as it was on 20" in (await resolve()).note
        await ActivityEnvironment().run(with_secret.discard_weights, weights)
        with pytest.raises(StepError):
            await resolve()
        state = fleet({"n1": inventory(weights=store.held(), peer_url=door.url)})
        found = await resolve()
        assert ": n1 has it as it was on 20" in found.note
        result = await run(with_secret, found)
        assert (result.peer_bytes, result.weights) == (20 * MIB, weights)
        assert "the mirror has it" in (await resolve()).note
    finally:
        door.close()

"""Weights from node to node: who is asked, what a door lets through, what a bad peer costs, and a swarm of twenty."""

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import ByteSize
from temporalio.testing import ActivityEnvironment

from activities.contract import MirrorRequest, ResolveRequest
from activities.mirror import Mirror
from activities.registry import Registry
from agent.offers import Offers
from agent.peers import PeerServer
from agent.weights import WeightStore
from fleet.peers import FAN, upstream
from fleet.reasons import Reason, StepError
from fleet.spec import Format, ModelFile, Weights
from runtime.config import ConfigError, HubConfig, MirrorConfig, NodeHubConfig, WeightsConfig
from runtime.peer_secret import read_secret
from runtime.peer_source import HAVE, PeerSource
from runtime.peer_wire import Pace
from runtime.sink import Sink
from tests.stub_hub import Fault, stub_hub
from tests.transfers import MIB, content, listed
from tests.waiting import until

SECRET = "a secret of the fleet"
NO_CACHE = WeightsConfig(hub_cache=None)


@dataclass
class Member:
    """A node's weights and its door."""

    store: WeightStore
    server: PeerServer
    urls: list[str] = field(default_factory=list)


@contextlib.contextmanager
def members(root: Path, count: int, config: WeightsConfig = NO_CACHE) -> Iterator[list[Member]]:
    found = []
    try:
        for number in range(count):
            store = WeightStore(root / f"n{number}", 0, config, secret=SECRET)
            server = PeerServer(store.offers, SECRET)
            server.open("127.0.0.1", 0)
            found.append(Member(store, server))
        yield found
    finally:
        for member in found:
            member.server.close()


def weights(data: dict[str, bytes], mirror: str, model_id: str = "m-1", hub: str = "") -> Weights:
    return Weights(
        model_id=model_id, format=Format.GGUF, entry=next(iter(data)), files=tuple(listed(data)), mirror=mirror, hub=hub
    )


async def bring(member: Member, wanted: Weights, *peers: str) -> tuple[str, dict[str, int]]:
    got = await member.store.bring(wanted, lambda done, total: None, peers)
    await member.store.close()
    return got.outcome, {str(kind): size for kind, size in got.sources.items()}


DATA = {"model.gguf": content("peers", 9 * MIB + 5), "small.json": content("small", 300)}
SIZE = sum(map(len, DATA.values()))


# -- who is asked -----------------------------------------------------------------------------------------------------


def test_a_tree_beneath_the_first_node_where_nobody_has_the_files() -> None:
    nodes = [f"n{number}" for number in range(20)]
    ways = {node: upstream(node, [], nodes[:place]) for place, node in enumerate(nodes)}
    assert ways["n0"] == []
    assert ways["n1"] == ["n0"]
    assert ways["n2"] == ["n0"]
    assert ways["n19"] == ["n9", "n4", "n1", "n0"]
    fed = [way[0] for way in ways.values() if way]
    assert max(fed.count(node) for node in nodes) == FAN
    assert all(nodes.index(other) < nodes.index(node) for node, way in ways.items() for other in way), "no circle"


def test_nodes_that_have_the_files_are_asked_first_and_in_turn() -> None:
    held = [f"h{number}" for number in range(12)]
    ways = [upstream(f"n{number}", held, []) for number in range(40)]
    assert all(len(way) == 8 and set(way) <= set(held) for way in ways)
    assert len({way[0] for way in ways}) > 6
    assert upstream("h0", ["h0"], []) == []


@pytest.mark.parametrize("count", [1, 2, 5])
def test_starts_form_a_forest_beneath_those_that_have_the_files(count: int) -> None:
    held, nodes = [f"h{number}" for number in range(count)], [f"n{number}" for number in range(30)]
    for place, node in enumerate(nodes):
        way = upstream(node, held, nodes[:place])
        assert way
        assert len(way) <= 8
        assert len(way) == len(set(way))
        assert all(other in held or nodes.index(other) < place for other in way)


# -- the door ---------------------------------------------------------------------------------------------------------


def ask(server: PeerServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {SECRET}", **headers})
        response = connection.getresponse()
        return response.status, response.read(), dict(response.headers)
    finally:
        connection.close()


@pytest.fixture
async def holder(tmp_path: Path) -> AsyncIterator[Member]:
    with members(tmp_path / "holder", 1) as [member], stub_hub(DATA) as hub:
        await bring(member, weights(DATA, hub.url))
        yield member


async def test_the_door_gives_ranges_of_verified_files_by_hash_alone(holder: Member) -> None:
    digest = listed(DATA)[0].sha256
    status, body, headers = await asyncio.to_thread(ask, holder.server, f"/weights/{digest}", Range="bytes=5-9")
    assert (status, body, headers["Content-Range"]) == (206, DATA["model.gguf"][5:10], f"bytes 5-9/{9 * MIB + 5}")
    for path, asked, expected in [
        (f"/weights/{'0' * 64}", "bytes=0-9", 404),
        ("/weights/../m-1/model.gguf", "bytes=0-9", 404),
        (f"/weights/{digest}", "bytes=99999999-", 416),
        (f"/weights/{digest}", "lines=1-2", 416),
    ]:
        assert (await asyncio.to_thread(ask, holder.server, path, Range=asked))[0] == expected


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Basic x", "Bearer "])
async def test_the_door_is_shut_without_the_secret(holder: Member, given: str) -> None:
    path = f"/weights/{listed(DATA)[0].sha256}"
    assert (await asyncio.to_thread(ask, holder.server, path, Authorization=given))[:2] == (401, b"")


async def test_a_file_that_grows_is_given_as_far_as_it_is(tmp_path: Path) -> None:
    offers, part = Offers(tmp_path), tmp_path / "part"
    part.write_bytes(b"0123456789")
    server = PeerServer(offers, SECRET)
    server.open("127.0.0.1", 0)
    try:
        offers.grow("a" * 64, part, 6, 20)
        path = f"/weights/{'a' * 64}"
        assert (await asyncio.to_thread(ask, server, path, Range="bytes=2-15"))[1] == b"2345"
        status, _, headers = await asyncio.to_thread(ask, server, path, Range="bytes=6-15")
        assert (status, headers[HAVE]) == (503, "6")
        offers.end("a" * 64)
        assert (await asyncio.to_thread(ask, server, path, Range="bytes=0-3"))[0] == 404
    finally:
        server.close()
    assert server.url == ""


@pytest.mark.parametrize("text", [None, "", "short", "line one of it\nline two of it"])
def test_a_secret_that_cannot_be_used_is_refused_at_start(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"weights\.token_file"):
        read_secret(path)
    assert read_secret(None) == ""


# -- sources in order -------------------------------------------------------------------------------------------------


async def test_a_peer_is_asked_before_the_mirror(holder: Member, tmp_path: Path) -> None:
    with members(tmp_path, 1) as [node]:
        got = await bring(node, weights(DATA, "file:///nowhere"), holder.server.url)
        assert got == ("peer", {"peer": SIZE})
        assert node.store.held() == ("m-1",)


async def test_the_hub_is_the_last_resort_and_only_where_allowed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    allowed = WeightsConfig(hub_cache=None, hub=NodeHubConfig(enabled=True, token_file=token))
    with stub_hub(DATA, token="hf_secret") as hub:
        base = f"{hub.url}/org/name/resolve/0123456789abcdef0123456789abcdef01234567"
        wanted = weights(DATA, (tmp_path / "gone").as_uri(), hub=base)
        with members(tmp_path / "a", 1) as [node]:
            with pytest.raises(StepError) as caught:
                await bring(node, wanted)
            assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
            assert hub.given == 0
        with members(tmp_path / "b", 1, allowed) as [node]:
            assert await bring(node, wanted) == ("hub", {"hub": SIZE})


async def test_a_hubs_cache_counts_as_local_where_the_hash_is_right(tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--org--name"
    digest = listed(DATA)[0].sha256
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "blobs" / digest).write_bytes(DATA["model.gguf"])
    (repo / "snapshots" / "abc" / "model.gguf").symlink_to(repo / "blobs" / digest)
    (repo / "snapshots" / "abc" / "small.json").write_bytes(DATA["small.json"])
    config = WeightsConfig(hub_cache=tmp_path / "cache")
    with members(tmp_path / "a", 1, config) as [node]:
        assert await bring(node, weights(DATA, "file:///nowhere")) == ("local", {"local": SIZE})
        here = node.store.directory(weights(DATA, "")) / "model.gguf"
        assert here.stat().st_ino == (repo / "blobs" / digest).stat().st_ino
    # A spoilt blob is no match: that file alone comes from elsewhere.
    (repo / "blobs" / digest).write_bytes(bytes(len(DATA["model.gguf"])))
    with members(tmp_path / "b", 1, config) as [node], stub_hub(DATA) as hub:
        outcome, given = await bring(node, weights(DATA, hub.url))
        assert (outcome, given) == ("mirror", {"local": 300, "mirror": len(DATA["model.gguf"])})


async def test_another_model_here_with_the_same_file_is_local_too(holder: Member) -> None:
    again = weights({"other/name.gguf": DATA["model.gguf"]}, "file:///nowhere", model_id="m-2")
    assert (await bring(holder, again))[0] == "local"


# -- bad peers --------------------------------------------------------------------------------------------------------


async def test_a_peer_that_lies_costs_one_file_and_is_not_asked_again(tmp_path: Path) -> None:
    data = {f"part-{number}.gguf": content(f"p{number}", MIB) for number in range(6)}
    with members(tmp_path, 2) as [liar, node], stub_hub(data) as hub:
        for name, file in zip(data, listed(data), strict=True):
            path = tmp_path / f"lie-{name}"
            path.write_bytes(bytes(file.size))
            liar.store.offers.grow(file.sha256, path, file.size, file.size)
        outcome, given = await bring(node, weights(data, hub.url), liar.server.url)
        assert outcome == "mirror"
        assert given["mirror"] == 6 * MIB
        assert given["peer"] <= 2 * MIB, "two files at a time were asked of it, no more"


async def test_a_peer_that_is_slow_or_silent_is_left_for_the_next_source(tmp_path: Path) -> None:
    [file] = listed({"a.gguf": bytes(MIB)})
    pace = Pace(connect_s=1, silent_s=0.3, grace_s=0.2, rate=64 * MIB)
    server = await asyncio.start_server(_trickle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        source = PeerSource(f"http://127.0.0.1:{port}", SECRET, pace=pace)
        with pytest.raises(StepError, match="is too slow"):
            await poured(source, file, tmp_path)
        await source.close()
    offers = Offers(tmp_path)
    offers.grow(file.sha256, tmp_path / "part", 0, file.size)
    waiting = PeerServer(offers, SECRET)
    waiting.open("127.0.0.1", 0)
    url = waiting.url
    try:
        source = PeerSource(url, SECRET, patience_s=0.4)
        with pytest.raises(StepError, match=r"does not get a\.gguf"):
            await poured(source, file, tmp_path)
        await source.close()
    finally:
        waiting.close()
    source = PeerSource(url, SECRET)
    with pytest.raises(StepError) as caught:
        await poured(source, file, tmp_path)
    assert caught.value.failure.reason is Reason.NODE_UNREACHABLE
    await source.close()


async def poured(source: PeerSource, file: ModelFile, home: Path) -> int:
    """How many bytes of the file came."""
    sink = await Sink.open(home / "poured", file)
    try:
        await source.pour(file, sink, lambda size: None)
    finally:
        sink.close()
    return sink.size


async def _trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Gives ten bytes every 20 ms."""
    with contextlib.suppress(ConnectionError):
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 206 x\r\nContent-Range: bytes 0-{MIB - 1}/{MIB}\r\nContent-Length: {MIB}\r\n\r\n"
        writer.write(head.encode())
        while not writer.is_closing():
            writer.write(bytes(10))
            await writer.drain()
            await asyncio.sleep(0.02)


# -- many at once -----------------------------------------------------------------------------------------------------


async def test_twenty_nodes_draw_one_copy_from_the_mirror(tmp_path: Path) -> None:
    data = {"one.gguf": content("one", 8 * MIB), "two.gguf": content("two", 5 * MIB)}
    total = 13 * MIB
    with stub_hub(data) as mirror, members(tmp_path, 20) as nodes:
        names = [f"n{number}" for number in range(20)]
        urls = {name: member.server.url for name, member in zip(names, nodes, strict=True)}
        starts = [
            bring(member, weights(data, mirror.url), *(urls[other] for other in upstream(name, [], names[:place])))
            for place, (name, member) in enumerate(zip(names, nodes, strict=True))
        ]
        got = await asyncio.gather(*starts)
        assert all(member.store.held() == ("m-1",) for member in nodes)
        assert mirror.given <= 1.5 * total, f"{mirror.given / total:.1f} copies"
        assert sum(outcome == "peer" for outcome, _ in got) >= 17


async def test_twenty_nodes_cost_the_hub_one_copy_and_the_mirror_about_one(tmp_path: Path) -> None:
    data = {"m.gguf": content("hub", 9 * MIB)}
    allowed = WeightsConfig(hub_cache=None, hub=NodeHubConfig(enabled=True))
    with stub_hub(data) as hub, members(tmp_path, 20, allowed) as nodes:
        config = HubConfig(endpoint=hub.url)
        mirror = Mirror(MirrorConfig(path=tmp_path / "mirror", keep_free=ByteSize(0)), config)
        environment = ActivityEnvironment()
        resolved = await environment.run(Registry(config).resolve_model, ResolveRequest(repo="org/name"))
        mirrored = await environment.run(mirror.mirror_model, MirrorRequest(resolved=resolved))
        assert mirrored.weights.hub, "so that each of them could ask the hub"
        names = [f"n{number}" for number in range(20)]
        urls = {name: member.server.url for name, member in zip(names, nodes, strict=True)}
        starts = [
            bring(member, mirrored.weights, *(urls[other] for other in upstream(name, [], names[:place])))
            for place, (name, member) in enumerate(zip(names, nodes, strict=True))
        ]
        given = [sources for _, sources in await asyncio.gather(*starts)]
        assert all(sum(sources.values()) == 9 * MIB for sources in given)
        assert hub.given == 9 * MIB, "the mirror's own"
        assert sum(sources.get("mirror", 0) for sources in given) <= 1.5 * 9 * MIB


async def test_a_node_that_dies_in_the_middle_costs_its_children_nothing_but_time(tmp_path: Path) -> None:
    data = {"one.gguf": content("one", 12 * MIB)}
    with stub_hub(data) as mirror, members(tmp_path, 3) as [root, middle, leaf]:
        await bring(root, weights(data, mirror.url))
        [file] = listed(data)
        partial = tmp_path / "part"
        partial.write_bytes(data["one.gguf"][: 4 * MIB])
        middle.store.offers.grow(file.sha256, partial, 4 * MIB, file.size)
        work = asyncio.ensure_future(bring(leaf, weights(data, mirror.url), middle.server.url, root.server.url))
        await until(lambda: list((tmp_path / "n2").glob("m-1.partial/.llmgw-parts/?*[0-9a-f]")))
        await until(
            lambda: any(path.stat().st_size >= 4 * MIB for path in (tmp_path / "n2").glob("m-1.partial/.llmgw-parts/*"))
        )
        middle.server.close()
        middle.store.offers.end(file.sha256)
        assert await work == ("peer", {"peer": 12 * MIB})
        assert mirror.given == 12 * MIB


async def test_faults_of_the_mirror_are_told_where_nobody_else_has_the_file(tmp_path: Path) -> None:
    with stub_hub(DATA, faults=[Fault("resolve", 99, status=404)]) as mirror, members(tmp_path, 2) as [other, node]:
        with pytest.raises(StepError) as caught:
            await bring(node, weights({"model.gguf": DATA["model.gguf"]}, mirror.url), "http://127.0.0.1:9")
        assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
        assert other.store.held() == node.store.held() == ()


def test_model_files_without_a_hash_are_never_asked_of_peers(tmp_path: Path) -> None:
    source = PeerSource("http://127.0.0.1:9", SECRET)
    with pytest.raises(StepError, match="has no hash"):
        asyncio.run(poured(source, ModelFile(path="x", size=1), tmp_path))

"""Peers that break the rules: each costs a moment, and no byte of the file."""

import asyncio
import contextlib
import hashlib
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.manifest import MANIFEST
from runtime.peer_source import PeerSource
from runtime.peer_wire import Pace
from runtime.sink import Sink
from runtime.transfer import fetch
from runtime.visit import PARTS
from tests.stub_hub import Fault, stub_hub
from tests.transfers import MIB, content, holds, listed, nothing, source_at
from tests.waiting import until

SECRET = "a secret of the fleet"
PACE = Pace(connect_s=0.5, silent_s=0.5, grace_s=60.0, rate=1.0)
DATA = content("bad", 6 * MIB)
[FILE] = listed({"a.gguf": DATA})

Talk = Callable[[asyncio.StreamWriter, int, int], Awaitable[None]]
"""Says something for a request from the first of the two bytes to the other, whose answer is then over."""


@asynccontextmanager
async def peer(talk: Talk) -> AsyncIterator[tuple[str, list[int]]]:
    """A peer's URL, and how many requests came on each connection. What it says is not HTTP of its own accord."""
    asked: list[int] = []
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())  # type: ignore[arg-type]
        number = len(asked)
        asked.append(0)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                asked[number] += 1
                span = re.search(r"bytes=(\d+)-(\d+)", head)
                assert span is not None
                await talk(writer, int(span[1]), int(span[2]))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)


def head(first: int, last: int, *, length: int | None = None, total: int = len(DATA), more: str = "") -> bytes:
    length = last - first + 1 if length is None else length
    return (
        f"HTTP/1.1 206 x\r\nContent-Range: bytes {first}-{last}/{total}\r\nContent-Length: {length}\r\n{more}\r\n"
    ).encode()


async def poured(url: str, home: Path, file: ModelFile = FILE, pace: Pace = PACE) -> bytes:
    """What of the file is there afterwards. Its hashes are those of the bytes, whatever happened."""
    source, sink = PeerSource(url, SECRET, pace=pace, patience_s=0.5), await Sink.open(home / "part", file)
    try:
        await source.pour(file, sink, lambda size: None)
    finally:
        await source.close()
        found = (home / "part").read_bytes()
        assert sink.size == len(found)
        assert sink.hashes().sha256 == hashlib.sha256(found).hexdigest()
        sink.close()
    return found


# -- answers ----------------------------------------------------------------------------------------------------------


async def _other_range(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(head(first + 1, last) + DATA[first + 1 :])


async def _too_long(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(head(first, last, length=len(DATA) * 1000) + DATA + DATA)


async def _of_another_file(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(head(first, last, total=len(DATA) + 1) + DATA)


async def _no_range(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(b"HTTP/1.1 206 x\r\nContent-Length: 5\r\n\r\n" + DATA[:5])


async def _in_chunks(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(b"HTTP/1.1 206 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n" + DATA[:5] + b"\r\n0\r\n\r\n")


async def _whole(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(b"HTTP/1.1 200 x\r\nContent-Length: 99999999999\r\n\r\n")
    while not writer.is_closing():
        writer.write(DATA)
        await writer.drain()


async def _no_http(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(DATA)


async def _nothing(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.close()


async def _letter_by_letter(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(b"HTTP/1.1 206 x\r\nX: ")
    while not writer.is_closing():
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


async def _one_byte(writer: asyncio.StreamWriter, first: int, last: int) -> None:
    writer.write(head(first, last) + DATA[first : first + 1])
    writer.close()


@pytest.mark.parametrize(
    ("talk", "came", "says"),
    [
        (_other_range, 0, "answers another range of a.gguf"),
        (_too_long, 0, "answers another range of a.gguf"),
        (_of_another_file, 0, "answers another range of a.gguf"),
        (_no_range, 0, "answers another range of a.gguf"),
        (_in_chunks, 0, "answers another range of a.gguf"),
        (_whole, 0, "answers 200 for a.gguf"),
        (_no_http, 0, ""),
        (_nothing, 0, "closed connection without response"),
        (_letter_by_letter, 0, "it does not answer"),
        (_one_byte, 2, "the connection ended early"),
    ],
)
async def test_an_answer_that_is_none_ends_with_the_peer(talk: Talk, came: int, says: str, tmp_path: Path) -> None:
    async with peer(talk) as (url, asked):
        with pytest.raises(StepError) as caught:
            await asyncio.wait_for(poured(url, tmp_path), 10)
    assert caught.value.failure.reason is Reason.NODE_UNREACHABLE
    assert says in caught.value.failure.detail
    assert (tmp_path / "part").read_bytes() == DATA[:came]
    assert sum(asked) <= 2


@pytest.mark.parametrize("have", ["²", "9" * 5000, "-1", "x"])
async def test_a_count_that_is_none_is_no_news(have: str, tmp_path: Path) -> None:
    async def talk(writer: asyncio.StreamWriter, first: int, last: int) -> None:
        writer.write(b"HTTP/1.1 503 x\r\nLLMGW-Have: " + have.encode("latin-1") + b"\r\nContent-Length: 0\r\n\r\n")

    async with peer(talk) as (url, asked):
        with pytest.raises(StepError, match=r"does not get a\.gguf"):
            await asyncio.wait_for(poured(url, tmp_path), 10)
    assert len(asked) == 1, "on one connection"


# -- connections ------------------------------------------------------------------------------------------------------


async def test_a_fetch_ends_while_a_peer_that_closes_trickles(tmp_path: Path) -> None:
    async def talk(writer: asyncio.StreamWriter, first: int, last: int) -> None:
        writer.write(head(first, last, more="Connection: close\r\n"))
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with peer(talk) as (url, _):
        task = asyncio.create_task(poured(url, tmp_path))
        await until(lambda: any(thread.name.startswith("pump") for thread in threading.enumerate()))
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()


async def test_connections_that_the_peer_closed_meanwhile_are_no_fault(tmp_path: Path) -> None:
    small = [listed({name: name.encode()})[0] for name in ("one", "two", "three")]
    writers: list[asyncio.StreamWriter] = []
    both = asyncio.Event()

    async def talk(writer: asyncio.StreamWriter, first: int, last: int) -> None:
        writers.append(writer)
        if len(writers) == 2:
            both.set()
        await both.wait()
        name = ("three", "one", "two")[0 if last == 4 else min(len(writers), 2)]
        writer.write(head(first, last, total=last + 1) + name[: last + 1].encode())

    async with peer(talk) as (url, asked):
        source = PeerSource(url, SECRET, pace=PACE)
        sinks = [await Sink.open(tmp_path / file.path, file) for file in small]
        try:
            await asyncio.gather(*(source.pour(small[at], sinks[at], lambda size: None) for at in (0, 1)))
            for writer in writers:
                writer.close()
                await writer.wait_closed()
            await source.pour(small[2], sinks[2], lambda size: None)
            assert sinks[2].hashes().wrong(small[2]) == ""
        finally:
            for sink in sinks:
                sink.close()
            await source.close()
    assert asked == [1, 1, 1]


async def test_a_connection_whose_answer_was_left_is_not_used_again(tmp_path: Path) -> None:
    """What is left of the answer would be taken for the next one."""
    half = 2 * MIB
    forged = head(half, len(DATA) - 1) + bytes(len(DATA) - half)

    async def talk(writer: asyncio.StreamWriter, first: int, last: int) -> None:
        if first:
            writer.write(head(first, last) + DATA[first:])
            return
        writer.write(head(first, last) + DATA[:half])
        await writer.drain()
        await asyncio.sleep(1.5 * PACE.silent_s)
        writer.write(forged)

    async with peer(talk) as (url, asked):
        assert await poured(url, tmp_path) == DATA
    assert asked == [1, 1]


# -- between sources --------------------------------------------------------------------------------------------------


async def bring(url: str, mirror: str, target: Path, data: dict[str, bytes]) -> dict[str, int]:
    sources = [PeerSource(url, SECRET, pace=PACE, patience_s=0.5), source_at(mirror)]
    target.parent.mkdir(exist_ok=True)
    try:
        got = await fetch(listed(data), sources, target, keep_free=0, progress=nothing)
    finally:
        for source in sources:
            await source.close()
    assert holds(target, data)
    assert got.copied_bytes == sum(got.sources.values())
    return {str(kind): size for kind, size in got.sources.items()}


@pytest.mark.parametrize("lies", [False, True])
async def test_the_mirror_goes_on_where_a_peer_broke_off(lies: bool, tmp_path: Path) -> None:
    """Where the peer lied, the mirror has its two tries of its own."""

    async def talk(writer: asyncio.StreamWriter, first: int, last: int) -> None:
        if not first:
            writer.write(head(first, last) + (bytes(3 * MIB) if lies else DATA[: 3 * MIB]))
        writer.close()

    data = {"a.gguf": DATA}
    # Of a lie, the mirror spoils the rest too, and an answer of its own first try.
    with stub_hub(data, faults=[Fault("resolve", 2 * lies, flip=True)]) as mirror:
        async with peer(talk) as (url, _):
            given = await bring(url, mirror.url, tmp_path / "here" / "m", data)
    assert given == {"peer": 3 * MIB, "mirror": (15 if lies else 3) * MIB}


async def test_nobody_is_blamed_for_what_an_earlier_fetch_left(tmp_path: Path) -> None:
    async def talk(writer: asyncio.StreamWriter, first: int, last: int) -> None:
        writer.write(head(first, last) + DATA[first : last + 1])

    parts = tmp_path / "here" / "m.partial" / PARTS
    parts.mkdir(parents=True)
    (parts / hashlib.sha256(FILE.path.encode()).hexdigest()[:32]).write_bytes(bytes(MIB))  # as after a power cut
    async with peer(talk) as (url, _):
        given = await bring(url, "file:///nowhere", tmp_path / "here" / "m", {"a.gguf": DATA})
    assert given == {"peer": 11 * MIB}
    assert (tmp_path / "here" / "m" / MANIFEST).is_file()

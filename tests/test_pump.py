"""Near bytes: none lost and none twice, whatever ends a copy, and nobody writes to what was closed."""

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.hashes import Hashes
from runtime.pump import PIECE, PIECES
from runtime.sink import Sink
from runtime.sources import FileSource
from runtime.threads import in_thread
from tests.transfers import content
from tests.waiting import until

DATA = content("pumped", 4 * PIECE + 7)


def told(size: int) -> None:
    assert size >= 0


def named(size: int) -> ModelFile:
    return ModelFile(path="model.gguf", size=size)


def hashes(data: bytes) -> Hashes:
    return Hashes(hashlib.sha256(data).hexdigest(), blake3(data).hexdigest())


class Spring:
    """Gives `data` in pieces of odd sizes; each waits for `go`, and what it gives at most is `most` bytes."""

    def __init__(self, data: bytes, most: int = PIECE) -> None:
        self._data, self._most = data, most
        self._random = Random(3)  # noqa: S311 -- the same sizes every time
        self.at = 0
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Event()

    def take(self, view: memoryview) -> int:
        self.asked.set()
        self.go.wait(30)
        size = min(len(view), self._random.randint(1, self._most), len(self._data) - self.at)
        view[:size] = self._data[self.at : self.at + size]
        self.at += size
        return size


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, PIECES * PIECE, len(DATA)])
@pytest.mark.parametrize("short", [False, True], ids=["whole files", "short reads"])
async def test_files_of_all_sizes(tmp_path: Path, size: int, short: bool) -> None:
    data, brought = DATA[:size], list[int]()
    (tmp_path / "source").write_bytes(data)
    sink = await Sink.open(tmp_path / "part", named(size))
    try:
        if short:
            await sink.draw(Spring(data).take, size, brought.append)
        else:
            there = FileSource("mirror", "source", lambda file: tmp_path / "source")
            await there.pour(named(size), sink, brought.append)
        assert (sink.size, sum(brought), sink.hashes()) == (size, size, hashes(data))
    finally:
        sink.close()
    assert (tmp_path / "part").read_bytes() == data


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_cancelled_copy_is_gone_on_with(tmp_path: Path, times: int) -> None:
    """Every byte that is in the file is in the hashes, and what was told."""
    spring, brought, cuts = Spring(DATA), list[int](), list[int]()
    sink = await Sink.open(tmp_path / "part", named(len(DATA)))
    try:
        spring.go.clear()
        task = asyncio.create_task(sink.draw(spring.take, len(DATA), brought.append, cut=lambda: cuts.append(1)))
        await until(spring.asked.is_set)
        for number in range(1, times + 1):
            task.cancel()
            await until(lambda number=number: len(cuts) == number)  # type: ignore[misc]
            assert not task.done(), "its thread may still write"
        spring.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 0 < sink.size == sum(brought) == spring.at < len(DATA)
        assert (tmp_path / "part").read_bytes() == DATA[: sink.size]
        assert sink.hashes() == hashes(DATA[: sink.size])
        await sink.draw(spring.take, len(DATA) - sink.size, brought.append)
        assert (sum(brought), sink.hashes()) == (len(DATA), hashes(DATA))
    finally:
        spring.go.set()
        sink.close()
    assert (tmp_path / "part").read_bytes() == DATA


async def test_what_came_before_a_judgement_is_told(tmp_path: Path) -> None:
    spring, brought = Spring(DATA, 4096), list[int]()

    def judge() -> None:
        if sum(brought):
            raise StepError(Reason.NODE_UNREACHABLE, "too slow")

    sink = await Sink.open(tmp_path / "part", named(len(DATA)))
    try:
        with suppress(StepError):
            await sink.draw(spring.take, len(DATA), brought.append, judge=judge)
        assert sum(brought) == sink.size == spring.at
        assert sink.hashes() == hashes(DATA[: sink.size])
    finally:
        sink.close()


async def test_a_disk_that_is_full_comes_before_a_judgement() -> None:
    """The piece that was not written is in the hashes: the next source must not append to that."""
    spring = Spring(DATA)
    spring.go.clear()

    def judge() -> None:
        raise StepError(Reason.NODE_UNREACHABLE, "too slow")

    sink = Sink(os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC), named(len(DATA)))
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            await sink.draw(spring.take, len(DATA), told, judge=judge, cut=spring.go.set)
        assert (caught.value.errno, sink.size) == (errno.ENOSPC, 0)
    finally:
        sink.close()


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "any call"])
def test_a_loop_that_ends_waits_for_the_threads(tmp_path: Path, drawn: bool) -> None:
    """It cancels every task that there is, also those beneath the one that will close the descriptor."""
    spring, order = Spring(DATA[:PIECE]), list[str]()
    spring.go.clear()

    def take(view: memoryview) -> int:
        size = spring.take(view)
        order.append("thread")
        return size

    async def caller() -> None:
        sink = await Sink.open(tmp_path / "part", named(PIECE))
        try:
            if drawn:
                await sink.draw(take, PIECE, told)
            else:
                await in_thread(take, memoryview(bytearray(PIECE)))
        finally:
            sink.close()
            order.append("closed")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(caller())
        await until(spring.asked.is_set)
        threading.Timer(0.3, spring.go.set).start()
        return task

    assert asyncio.run(main()).cancelled()
    assert order == ["thread", "closed"]


async def test_copies_that_wait_leave_the_loop_its_threads(tmp_path: Path) -> None:
    springs = [Spring(b"x") for _ in range(40)]
    sinks = [await Sink.open(tmp_path / str(number), named(1)) for number in range(40)]
    try:
        for spring in springs:
            spring.go.clear()
        draws = [asyncio.create_task(sink.draw(one.take, 1, told)) for one, sink in zip(springs, sinks, strict=True)]
        try:
            await until(lambda: all(spring.asked.is_set() for spring in springs))
            assert await asyncio.wait_for(in_thread(os.getpid), 10) == os.getpid()
        finally:
            for spring in springs:
                spring.go.set()
            await asyncio.gather(*draws)
    finally:
        for sink in sinks:
            sink.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("pump", "hash"))]


def test_a_file_that_was_opened_for_nobody_is_closed(tmp_path: Path) -> None:
    """In a loop of its own, which has one thread."""
    asyncio.run(_opened_for_nobody(tmp_path))


async def _opened_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)
    there = FileSource("mirror", "source", lambda file: tmp_path / "source")
    sink, go, busy = await Sink.open(tmp_path / "part", named(len(DATA))), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    def hold() -> None:
        busy.set()
        go.wait(30)

    try:
        holding = asyncio.create_task(in_thread(hold))
        await until(busy.is_set)
        task = asyncio.create_task(there.pour(named(len(DATA)), sink, told))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await holding
    finally:
        go.set()
        sink.close()
    assert not opened(lambda path: path == tmp_path / "source")


def opened(which: Callable[[Path], bool]) -> list[Path]:
    """Files that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(entry.readlink())
    return [path for path in found if which(path)]


async def pour(path: Path, file: ModelFile, change: Callable[[int], None]) -> bytes:
    """What is in the part when `path` is changed while it is copied."""
    there = FileSource("mirror", "there", lambda file: path)
    sink = await Sink.open(path.with_name("part"), file)
    opened = os.open(path, os.O_RDWR)
    try:
        await there.pour(file, sink, lambda size: change(opened))
    finally:
        sink.close()
        os.close(opened)
    return path.with_name("part").read_bytes()


async def test_a_source_that_shrinks(tmp_path: Path) -> None:
    size = 4 * 1024**3  # of holes; it is cut off within the first of its seconds
    (tmp_path / "source").touch()
    os.truncate(tmp_path / "source", size)
    with pytest.raises(StepError, match="shrank to") as caught:
        await pour(tmp_path / "source", named(size), lambda there: os.ftruncate(there, 1))
    assert caught.value.failure.reason is Reason.WEIGHTS_CORRUPT


@pytest.mark.parametrize("grows", [True, False], ids=["grows", "changes"])
async def test_a_source_that_grows_or_changes(tmp_path: Path, grows: bool) -> None:
    """Where a hash is known, it tells; where none is, the change itself is all that can be seen."""
    source = tmp_path / "source"

    def change(there: int) -> None:
        os.pwrite(there, b"x", len(DATA) if grows else 0)

    for file in (named(len(DATA)), named(len(DATA)).model_copy(update={"sha256": hashes(DATA).sha256})):
        source.write_bytes(DATA)
        os.utime(source, (1, 1))
        (tmp_path / "part").unlink(missing_ok=True)
        work = pour(source, file, change)
        if file.sha256:
            assert (await work)[1:] == DATA[1:]
        else:
            with pytest.raises(StepError, match="was changed while it was copied"):
                await work

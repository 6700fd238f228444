"""Transfers with real files, a real HTTP server, a real full disk and a real kill."""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.reasons import Reason
from fleet.spec import ModelFile
from runtime.manifest import MANIFEST, settle
from runtime.transfer import LOCK_POLL_S, fetch, verified
from runtime.visit import PARTS
from tests.stub_hub import Fault, stub_hub
from tests.transfers import DATA, MIB, bring, content, failure, holds, left, listed, nothing, source_at, write
from tests.waiting import until


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write(tmp_path / "source", DATA).as_uri()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "m-1"


@pytest.mark.parametrize("hashes", [True, False])
async def test_files_arrive_whole_with_their_hashes(source: str, target: Path, hashes: bool) -> None:
    seen: list[tuple[int, int]] = []
    fetched = await bring(DATA, source, target, hashes=hashes, progress=lambda done, total: seen.append((done, total)))
    assert holds(target, DATA)
    assert [file.sha256 for file in fetched.files] == [file.sha256 for file in listed(DATA)]
    total = sum(map(len, DATA.values()))
    assert fetched.copied_bytes == total
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert left(target) == {"m-1"}
    assert verified(target, listed(DATA))


async def test_second_fetch_copies_nothing_and_needs_no_source(source: str, target: Path) -> None:
    await bring(DATA, source, target)
    again = await bring(DATA, "file:///nowhere", target, hashes=False)
    assert again.copied_bytes == 0
    assert [file.sha256 for file in again.files] == [file.sha256 for file in listed(DATA)]


async def test_two_callers_copy_once(source: str, target: Path) -> None:
    both = await asyncio.gather(bring(DATA, source, target), bring(DATA, source, target))
    assert sorted(each.copied_bytes for each in both) == [0, sum(map(len, DATA.values()))]
    assert holds(target, DATA)


@pytest.mark.parametrize("manifest", ["gone", "damaged"])
async def test_without_manifest_files_are_hashed_and_only_the_wrong_one_is_fetched(
    source: str, target: Path, manifest: str
) -> None:
    await bring(DATA, source, target)
    (target / MANIFEST).unlink()
    if manifest == "damaged":
        (target / MANIFEST).write_text('{"files": [7')
    spoiled = bytearray(DATA["sub dir/100%.json"])
    spoiled[5] ^= 1
    (target / "sub dir/100%.json").write_bytes(spoiled)
    (target / "stray.bin").write_bytes(b"x")
    kept = (target / "model.gguf").stat().st_ino
    fetched = await bring(DATA, source, target)
    assert holds(target, DATA)
    assert fetched.copied_bytes == len(spoiled)
    assert (target / "model.gguf").stat().st_ino == kept
    assert left(target) == {"m-1"}


async def test_wrong_size_is_seen_and_the_open_file_of_an_engine_is_left_alone(source: str, target: Path) -> None:
    await bring(DATA, source, target)
    with (target / "model.gguf").open("r+b") as engine:
        engine.truncate(100)
        assert not verified(target, listed(DATA))
        await bring(DATA, source, target)
        engine.seek(0)
        assert len(engine.read()) == 100
    assert holds(target, DATA)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\\b", "a\nb", MANIFEST])
async def test_hostile_path_is_refused_before_anything_is_made(tmp_path: Path, path: str) -> None:
    target = tmp_path / "cache" / "m"
    work = fetch([ModelFile(path=path, size=1)], [], target, keep_free=0, progress=nothing)
    reason, _ = await failure(asyncio.ensure_future(work))
    assert reason is Reason.BAD_INPUT
    assert list(tmp_path.iterdir()) == []


async def test_symlink_in_the_partial_directory_is_not_followed(tmp_path: Path, source: str, target: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_bytes(b"keep me")
    partial = target.with_name("m-1.partial")
    partial.mkdir(parents=True)
    (partial / "sub dir").symlink_to(outside)
    (partial / "model.gguf").symlink_to(victim)
    await bring(DATA, source, target)
    assert victim.read_bytes() == b"keep me"
    assert list(outside.iterdir()) == [victim]
    assert holds(target, DATA)


async def test_missing_source(target: Path, tmp_path: Path) -> None:
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, (tmp_path / "none").as_uri(), target)))
    assert reason is Reason.WEIGHTS_MISSING
    assert f"{tmp_path}/none/" in detail
    assert left(target) == set()


async def test_source_of_another_size_or_kind(target: Path, tmp_path: Path) -> None:
    base = write(tmp_path / "s", {**DATA, "model.gguf": b"short"})
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, base.as_uri(), target)))
    assert (reason, "has 5 bytes" in detail) == (Reason.WEIGHTS_CORRUPT, True)
    (base / "model.gguf").unlink()
    os.mkfifo(base / "model.gguf")
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, base.as_uri(), target)))
    assert (reason, "is not a regular file" in detail) == (Reason.WEIGHTS_UNREADABLE, True)


async def test_wrong_bytes_are_fetched_again_once_then_named(target: Path, tmp_path: Path) -> None:
    spoiled = b"x" + DATA["model.gguf"][1:]
    base = write(tmp_path / "s", {**DATA, "model.gguf": spoiled})
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, base.as_uri(), target)))
    assert reason is Reason.WEIGHTS_CORRUPT
    assert detail.startswith("model.gguf has the SHA-256")
    assert not target.exists()
    await bring(DATA, write(tmp_path / "s", DATA).as_uri(), target)
    assert holds(target, DATA)


# -- the disk ---------------------------------------------------------------------------------------------------------


async def test_disk_too_small_is_refused_before_the_first_byte(source: str, target: Path) -> None:
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, source, target, keep_free=2**60)))
    assert reason is Reason.DISK_FULL
    assert detail.startswith(f"{target}: needs 9.0 MiB, ")
    assert left(target) == set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    tool, undo = shutil.which("mount"), shutil.which("umount")
    if tool is None or undo is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    done = subprocess.run([tool, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"this machine does not let us mount: {done.stderr.decode().strip()}")
    try:
        yield mount
    finally:
        subprocess.run([undo, "-l", str(mount)], check=True)


async def test_full_disk(small_disk: Path, source: str) -> None:
    target = small_disk / "m"
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, source, target)))
    assert (reason, detail) == (Reason.DISK_FULL, f"{target}: needs 9.0 MiB, 1020 KiB is free")
    assert left(target) == set()


async def test_space_is_taken_before_the_first_byte_and_given_back(small_disk: Path) -> None:
    data = {name: content(name, 300_000) for name in ("a", "b", "c")}
    target, hold = small_disk / "m", threading.Event()
    with stub_hub(data, faults=[Fault("resolve", 9, hold=hold)]) as hub:
        task = asyncio.ensure_future(bring(data, hub.url, target))
        try:
            await until(lambda: len(hub.asked("")) == 2)
            # Another fetch, and any other program, finds the space taken.
            other = await failure(asyncio.ensure_future(bring({"d": bytes(300_000)}, hub.url, small_disk / "n")))
            assert other[0] is Reason.DISK_FULL
            with pytest.raises(OSError, match="No space left"):
                (small_disk / "hog").write_bytes(bytes(300_000))
            (small_disk / "hog").unlink()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            hold.set()
        assert {path.name for path in small_disk.iterdir()} == {"m.lock", "n.lock", ".reserve.lock"}
        assert shutil.disk_usage(small_disk).free > 900_000
        assert (await bring(data, hub.url, target)).copied_bytes == 900_000
    assert holds(target, data)


async def test_place_that_cannot_be_written(tmp_path: Path, source: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, source, tmp_path / "file" / "m")))
    assert reason is Reason.NOT_WRITABLE
    assert str(tmp_path / "file" / "m") in detail


# -- cancelled and killed ---------------------------------------------------------------------------------------------


async def test_cancel_leaves_nothing_and_lets_the_next_one_in(target: Path, source: str) -> None:
    hold = threading.Event()
    with stub_hub(DATA, faults=[Fault("resolve", 9, hold=hold, since=1)]) as hub:
        seen: list[int] = []
        task = asyncio.ensure_future(bring(DATA, hub.url, target, progress=lambda done, _: seen.append(done)))
        try:
            await until(lambda: seen and seen[-1] > 0)
            assert target.with_name("m-1.partial").exists()
            waiting = asyncio.ensure_future(bring(DATA, source, target))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await waiting).copied_bytes == sum(map(len, DATA.values()))
        finally:
            hold.set()
    assert holds(target, DATA)
    assert left(target) == {"m-1"}


async def test_waiter_can_be_cancelled(target: Path, source: str) -> None:
    hold = threading.Event()
    with stub_hub(DATA, faults=[Fault("resolve", 9, hold=hold, since=1)]) as hub:
        seen: list[int] = []
        first = asyncio.ensure_future(bring(DATA, hub.url, target, progress=lambda done, _: seen.append(done)))
        try:
            await until(lambda: seen and seen[-1] > 0)
            second = asyncio.ensure_future(bring(DATA, source, target))
            done, _ = await asyncio.wait([second], timeout=3 * LOCK_POLL_S)
            assert not done
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        finally:
            hold.set()
        assert (await first).copied_bytes == sum(map(len, DATA.values()))
    assert holds(target, DATA)


KILLED = """
import asyncio, json, sys
from pathlib import Path
from fleet.spec import ModelFile
from runtime.http_source import HttpSource
from runtime.transfer import fetch
files = [ModelFile.model_validate(each) for each in json.loads(sys.argv[1])]
mirror = HttpSource("mirror", "hub", lambda file: sys.argv[2] + "/" + file.path)
asyncio.run(fetch(files, [mirror], Path(sys.argv[3]), keep_free=0, progress=lambda done, total: None))
"""


async def test_killed_fetch_is_continued_where_it_was(target: Path) -> None:
    data = {"first.gguf": content("f", MIB), "second.gguf": content("s", 30 * MIB)}
    hold = threading.Event()
    # The first file and two ranges of the second come, the others are held until the process is dead.
    with stub_hub(data, faults=[Fault("resolve", 9, hold=hold, since=8 * MIB)]) as hub:
        listing = json.dumps([file.model_dump() for file in listed(data)])
        root = Path(__file__).parent.parent
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, listing, hub.url, str(target), cwd=root, stdout=asyncio.subprocess.DEVNULL
        )
        partial = target.with_name("m-1.partial")

        def part() -> int:
            return max((path.stat().st_size for path in (partial / PARTS).glob("?" * 32)), default=0)

        try:
            await until(lambda: part() >= 8 * MIB and (partial / "first.gguf").exists(), timeout=30)
        finally:
            process.kill()
            await process.wait()
            hold.set()
        had, asked, hub.faults = part(), len(hub.requests), []
        fetched = await bring(data, hub.url, target)
        assert fetched.copied_bytes == len(data["second.gguf"]) - had
        ranges = [headers["range"] for _, path, headers in hub.requests[asked:] if "second" in path]
        assert min(int(one.removeprefix("bytes=").partition("-")[0]) for one in ranges) == had
        assert len(hub.asked("first")) == 1
    assert holds(target, data)


async def test_what_was_whole_before_the_machine_started_anew_is_hashed_again(source: str, target: Path) -> None:
    await bring(DATA, source, target)
    partial = target.with_name("m-1.partial")
    target.rename(partial)
    (partial / MANIFEST).unlink()
    spoiled = bytearray(DATA["sub dir/100%.json"])
    spoiled[5] ^= 1
    (partial / "sub dir/100%.json").write_bytes(spoiled)
    (partial / PARTS).mkdir()
    (partial / PARTS / "boot").write_text("another boot")
    fetched = await bring(DATA, source, target)
    assert holds(target, DATA)
    assert fetched.copied_bytes == len(spoiled)


async def test_a_manifest_counts_until_the_machine_stops_and_for_good_once_settled(source: str, target: Path) -> None:
    await bring(DATA, source, target)
    written = json.loads((target / MANIFEST).read_text())
    assert written["boot"]
    (target / MANIFEST).write_text(json.dumps({**written, "boot": "another"}))
    assert not verified(target, listed(DATA))
    assert (await bring(DATA, "file:///nowhere", target)).copied_bytes == 0  # hashed, found right, and taken over
    settle(target)
    assert "boot" not in json.loads((target / MANIFEST).read_text())
    assert verified(target, listed(DATA))
    assert holds(target, DATA)


async def test_what_is_a_file_of_another_model_too_is_never_written_to(source: str, target: Path) -> None:
    """A fetch linked it, the machine stopped, and it has other bytes now: the right ones do not belong there."""
    other, partial = target.with_name("other.gguf"), target.with_name("m-1.partial")
    (partial / PARTS).mkdir(parents=True)
    spoiled = bytes(len(DATA["model.gguf"]))
    other.write_bytes(spoiled)
    (partial / "model.gguf").hardlink_to(other)
    (partial / PARTS / "boot").write_text("another boot")
    await bring(DATA, source, target)
    assert holds(target, DATA)
    assert other.read_bytes() == spoiled


async def test_without_a_hash_no_two_sources_are_mixed(target: Path) -> None:
    ours, theirs = ({"a.gguf": content(name, 9 * MIB)} for name in ("ours", "theirs"))
    gone = Fault("resolve", 9, status=404, since=MIB)
    with stub_hub(ours, faults=[gone]) as first, stub_hub(theirs) as second:
        sources = [source_at(first.url), source_at(second.url)]
        await fetch(listed(ours, hashes=False), sources, target, keep_free=0, progress=lambda done, total: None)
        for one in sources:
            await one.close()
    assert holds(target, theirs)


async def test_hashing_what_is_here_ends_soon_when_cancelled(tmp_path: Path, target: Path) -> None:
    """A part of 200 GB would hold up the next start for minutes."""
    file = ModelFile(path="a.gguf", size=16 * 1024**3, sha256="0" * 64)  # on disk it is empty, and yet reserved
    huge = target.with_name("m-1.partial") / PARTS / hashlib.sha256(b"a.gguf").hexdigest()[:32]
    huge.parent.mkdir(parents=True)
    for path in (huge, tmp_path / "a.gguf"):
        path.touch()
        os.truncate(path, file.size)

    async def hashed(local: Path | None) -> None:
        await fetch(
            [file],
            [source_at("file:///nowhere")],
            target,
            keep_free=0,
            progress=nothing,
            local=lambda file: [local] if local else [],
        )

    for local in (None, tmp_path / "a.gguf"):
        task = asyncio.create_task(hashed(local))
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

"""The ledger: what is put comes back, also after a crash in the middle, and a damaged file is no disaster."""

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.node_contract import ShardRef
from agent.ledger import MAX_BYTES, Book, Entry, Held, Ledger, book_bytes, read_book
from agent.processes import Mark
from agent.supervisor import EngineProcess
from fleet.reasons import Reason, StepError
from fleet.spec import Engine
from tests.test_end_to_end import small_disk


def entry(replica: str = "tiny-0", generation: int = 1, port: int = 21000) -> Entry:
    mark = Mark(pid=1, start_ticks=2, boot_id="b")
    return Entry(
        shard=ShardRef(replica=replica, generation=generation),
        model="tiny",
        engine=Engine.LLAMACPP,
        port=port,
        endpoint=f"http://127.0.0.1:{port}",
        stem=f"/logs/{replica}.0/{generation}-1",
        process=EngineProcess(stem="s", shim=mark, engine=mark),
    )


def test_a_second_ledger_reads_what_the_first_wrote(tmp_path: Path) -> None:
    path = tmp_path / "data" / "ledger.json"
    first = Ledger(path)
    first.put(entry())
    first.put(entry("other-0", 4, 21001))
    first.note_start(entry().shard)
    first.note_stop(entry("other-0", 3).shard)
    second = Ledger(path)
    assert second.entries() == (entry(), entry("other-0", 4, 21001))
    assert second.started(entry().shard) == 1
    assert second.stopped(entry("other-0").shard) == 3
    assert not second.lost


def test_dropping_an_old_generation_leaves_the_new_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    ledger.put(entry(generation=2))
    ledger.drop(entry(generation=1))
    assert ledger.entry(entry().shard) == entry(generation=2)
    ledger.drop(entry(generation=2))
    assert ledger.entries() == ()


def test_generations_only_grow(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    ledger.note_start(entry(generation=5).shard)
    ledger.note_start(entry(generation=3).shard)
    assert ledger.started(entry().shard) == 5
    ledger.drop(entry(generation=5))
    assert Ledger(tmp_path / "ledger.json").started(entry().shard) == 5


def test_the_highest_generation_is_of_any_shard_started_or_stopped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    assert ledger.highest_generation() == 0
    ledger.note_start(entry(generation=5).shard)
    ledger.note_stop(entry("other-0", generation=7).shard)
    assert ledger.highest_generation() == 7


def saved(path: Path) -> bytes:
    """A ledger with everything in it."""
    ledger = Ledger(path)
    ledger.note_start(entry().shard)
    ledger.note_stop(entry("other-0", 3).shard)
    ledger.reserve(entry())
    ledger.put(entry("other-0", 4, 21001))
    ledger.hold(held())
    return path.read_bytes()


def held() -> Held:
    process = entry().process
    assert process is not None
    return Held(shard=entry().shard, process=process, devices=("GPU-0",), sentence="pid 1 stays")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    good = saved(tmp_path / "ledger.json")
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError):
        read_book(bytes(bad))


def test_no_cut_goes_unnoticed(tmp_path: Path) -> None:
    good = saved(tmp_path / "ledger.json")
    for length in range(len(good)):
        with pytest.raises(ValueError):
            read_book(good[:length])
    with pytest.raises(ValueError):
        read_book(good + b" ")
    assert book_bytes(read_book(good)) == good


def test_the_ledger_of_an_agent_that_kept_no_sums_is_read(tmp_path: Path) -> None:
    good = json.loads(saved(tmp_path / "ledger.json"))["book"]
    del good["held"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(good))
    ledger = Ledger(path)
    assert ledger.entries() == (entry(), entry("other-0", 4, 21001))
    assert not ledger.lost
    ledger.note_port(1)
    assert Ledger(path).entries() == ledger.entries()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"entries": 3}',
        b'{"entries": 3, "started": {}, "stopped": {}}',
        b'{"entries": {"a.0": {}}, "started": {}, "stopped": {}}',
        b'{"entries": {}, "started": {"a.0": "many"}, "stopped": {}}',
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b" " * (MAX_BYTES + 1),
    ],
    ids=range(11),
)
def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.json"
    for number in (1, 2):
        path.write_bytes(content)
        ledger = Ledger(path)
        assert ledger.lost
        assert ledger.entries() == ()
        assert (tmp_path / f"ledger.json.corrupt-{number}").read_bytes() == content
    assert "set aside" in caplog.text
    assert ledger.trouble == "the ledger was damaged, set aside as ledger.json.corrupt-2, and rebuilt from what runs"
    ledger.put(entry())
    assert Ledger(path).entries() == (entry(),)


def test_each_change_is_on_the_disk_before_it_has_the_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.json"
    ledger = Ledger(path)
    ledger.put(entry())
    sync, synced = os.fsync, list[tuple[str, int, int]]()

    def noted(descriptor: int) -> None:
        sync(descriptor)
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        there = len(read_book(place.read_bytes()).entries) if place.is_file() else 0
        synced.append((place.name, there, len(read_book(path.read_bytes()).entries)))

    monkeypatch.setattr(os, "fsync", noted)
    ledger.put(entry("other-0"))
    assert synced == [("ledger.json.partial", 2, 1), (tmp_path.name, 0, 2)]


def test_a_half_written_file_of_a_killed_agent_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(path).put(entry())
    (tmp_path / "ledger.json.partial").write_text('{"entr')
    assert Ledger(path).entries() == (entry(),)


def test_something_else_in_its_place_is_set_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.mkdir()
    assert Ledger(path).lost
    assert (tmp_path / "ledger.json.corrupt-1").is_dir()


class FullDisk(Ledger):
    """On a disk that is full as long as the test says so."""

    full = False

    def _write(self, book: Book) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(book)


def test_on_a_full_disk_nothing_is_started_and_everything_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.json"
    ledger = FullDisk(path)
    ledger.put(entry())
    ledger.full = True
    with pytest.raises(StepError, match="cannot be written: No space left") as caught:
        ledger.reserve(entry("new-0"))
    assert caught.value.failure.reason is Reason.DISK_FULL
    with pytest.raises(StepError, match="cannot be written: No space left"):
        ledger.note_start(entry("new-0").shard)
    assert (ledger.entry(entry("new-0").shard), ledger.started(entry("new-0").shard)) == (None, 0)
    ledger.note_stop(entry().shard)
    ledger.drop(entry())
    ledger.flush()
    assert (ledger.entries(), ledger.stopped(entry().shard)) == ((), 1)
    assert Ledger(path).entries() == (entry(),), "a later agent finds the older one"
    assert caplog.text.count("kept in memory until it can") == 1
    ledger.full = False
    ledger.flush()
    assert (Ledger(path).entries(), Ledger(path).stopped(entry().shard)) == ((), 1)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "64k") as place:
        ledger = Ledger(place / "ledger.json")
        ledger.put(entry())
        with contextlib.suppress(OSError), (place / "filler").open("wb") as filler:
            while filler.write(bytes(4096)):
                filler.flush()
        with pytest.raises(StepError, match="No space left") as caught:
            ledger.reserve(entry("a" * 100))
        assert caught.value.failure.reason is Reason.DISK_FULL
        assert sorted(path.name for path in place.iterdir()) == ["filler", "ledger.json"]
        assert Ledger(place / "ledger.json").entries() == (entry(),)


def test_ports_go_round_and_skip_what_is_taken(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.json")
    assert ledger.next_port(10, 13) == [10, 11, 12, 13]
    ledger.note_port(11)
    assert Ledger(tmp_path / "ledger.json").next_port(10, 13) == [12, 13, 10, 11]
    ledger.put(entry(port=13))
    assert ledger.next_port(10, 13) == [12, 10, 11]


@pytest.mark.parametrize("replica", ["", "../x", "a/b", "A", ".hidden", "a" * 200])
def test_a_replica_that_is_no_plain_name_is_refused(tmp_path: Path, replica: str) -> None:
    with pytest.raises(StepError, match="is no replica's id"):
        Ledger(tmp_path / "ledger.json").put(entry(replica))

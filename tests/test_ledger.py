"""The ledger: what is put comes back, also after a crash in the middle, and a damaged file is no disaster."""

from pathlib import Path

import pytest

from activities.node_contract import ShardRef
from agent.ledger import Entry, Ledger
from agent.processes import Mark
from agent.supervisor import EngineProcess
from fleet.reasons import StepError
from fleet.spec import Engine


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


@pytest.mark.parametrize("content", [b"", b"{", b'{"entries": 3}', b"\xff\xfe", b"[]"])
def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ledger.json"
    for number in (1, 2):
        path.write_bytes(content)
        ledger = Ledger(path)
        assert ledger.lost
        assert ledger.entries() == ()
        assert (tmp_path / f"ledger.json.corrupt-{number}").read_bytes() == content
    assert "set aside" in caplog.text
    ledger.put(entry())
    assert Ledger(path).entries() == (entry(),)


def test_a_half_written_file_of_a_killed_agent_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    Ledger(path).put(entry())
    (tmp_path / "ledger.json.partial").write_text('{"entr')
    assert Ledger(path).entries() == (entry(),)


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

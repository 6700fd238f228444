"""What engines write is bounded on the disk, keeps its beginning and its end, and reads as one text."""

import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from agent.layout import Layout
from agent.shim import KEPT_SEGMENTS, SEGMENT_BYTES, Log
from agent.supervisor import Supervisor
from runtime.engine_logs import LaunchLog, forget, launch_of, launches, too_many
from tests.fake_engines.acts import ended_launch
from tests.waiting import until

MIB = 1024**2


def lines(first: int, count: int) -> bytes:
    """Numbered lines of 16 bytes."""
    return b"".join(b"line %10d\n" % number for number in range(first, first + count))


def test_a_short_log_is_one_file(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "7-1.log"))
    log.write(b"one\n")
    log.write(b"two\n")
    read = launch_of(str(tmp_path / "7-1"))
    assert [segment.path.name for segment in read.segments()] == ["7-1.log"]
    assert (read.size(), read.tail(5), read.head(3)) == (8, b"\ntwo\n"[-5:], b"one")
    assert [piece.data for piece in read.read(4)] == [b"two\n"]


def test_an_endless_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("7-1.log")
    log = Log(str(tmp_path / "7-1.log"))
    per_write = 4096  # lines
    for number in range(0, 2 * MIB, per_write):
        log.write(lines(number, per_write))
    read = launch_of(str(tmp_path / "7-1"))
    assert read.size() == 32 * MIB
    assert read.disk()[0] <= (1 + KEPT_SEGMENTS) * SEGMENT_BYTES
    pieces = list(read.read())
    assert pieces[0].data.startswith(lines(0, 1))
    assert pieces[-1].data.endswith(lines(2 * MIB - 1, 1))
    gaps = [after.offset - before.end for before, after in pairwise(pieces)]
    assert [gap for gap in gaps if gap] == [32 * MIB - (1 + KEPT_SEGMENTS) * SEGMENT_BYTES]
    assert read.tail(160) == lines(2 * MIB - 10, 10)
    assert read.tail(6 * MIB) == lines(2 * MIB - 6 * MIB // 16, 6 * MIB // 16), "over the border of two segments"
    assert len(read.tail(32 * MIB)) == KEPT_SEGMENTS * SEGMENT_BYTES, "what stands before the gap is no tail"
    assert (tmp_path / "latest").resolve() == read.segments()[-1].path.resolve()


def test_latest_stays_with_a_newer_launch(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("8-1.log")
    Log(str(tmp_path / "7-1.log")).write(bytes(SEGMENT_BYTES + 1))
    assert (tmp_path / "latest").readlink() == Path("8-1.log")


def test_a_full_disk_loses_output_and_nothing_else() -> None:
    log = Log("/dev/full")
    log.write(b"this is lost\n")
    log.write(b"and this\n")


def test_what_was_lost_is_said_when_there_is_room_again(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "7-1.log"))
    fd = log._fd
    log._fd = os.open("/dev/full", os.O_WRONLY)
    log.write(b"this is lost\n")
    os.close(log._fd)
    log._fd = fd
    log.write(b"back\n")
    expected = b"\nllmgw: 13 bytes of output are lost here: the disk was full\nback\n"
    assert (tmp_path / "7-1.log").read_bytes() == expected


def test_launches_are_in_the_order_they_were_made(tmp_path: Path) -> None:
    for name in ("10-1.log", "9-2.log", "9-10.log", "9-2.pid", "10-1.log.4194304", "latest", "x.log", "9.log"):
        (tmp_path / name).write_text("")
    assert [launch.name for launch in launches(tmp_path)] == ["9-2", "9-10", "10-1"]
    assert launches(tmp_path / "absent") == ()


@pytest.mark.parametrize(
    ("count", "size", "going"),
    [(9, 9000, []), (2, 9000, ["1-1", "2-1"]), (9, 250, ["1-1", "2-1"]), (9, 0, ["1-1", "2-1", "3-1", "4-1"])],
)
def test_the_oldest_go_first(tmp_path: Path, count: int, size: int, going: list[str]) -> None:
    made = [launch(tmp_path, f"{number}-1", 100, changed=number) for number in (3, 1, 4, 2)]
    assert [one.name for one in too_many(made, count, size)] == going


def launch(directory: Path, name: str, size: int, changed: float) -> LaunchLog:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.log"
    path.write_bytes(bytes(size))
    os.utime(path, (changed, changed))
    return launch_of(str(directory / name))


def test_the_last_launch_of_a_shard_takes_its_directory_along(tmp_path: Path) -> None:
    directory = tmp_path / "gone-0.0"
    one, other = launch(directory, "1-1", 1, 1), launch(directory, "1-2", 1, 2)
    (directory / "1-1.exit").write_text("{}")
    (directory / "latest").symlink_to("1-2.log")
    forget(one)
    assert sorted(path.name for path in directory.iterdir()) == ["1-2.log", "latest"]
    forget(other)
    assert not directory.exists()


def test_logs_of_all_shards_together_are_bounded_and_those_long_gone_go_first(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for number in range(5):
        ended_launch(layout, f"gone-{number}", size=MIB, changed=1000.0 + number)
    Supervisor(layout, log_bytes=3 * MIB + 1000).make_room()
    assert sorted(path.name for path in layout.logs.iterdir()) == ["gone-2.0", "gone-3.0", "gone-4.0"]


async def test_an_engine_that_writes_without_end_fills_no_disk_and_is_not_held_up(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    supervisor = Supervisor(layout)
    script = """
import os, sys
for first in range(0, 2**21, 4096):
    block = b"".join(b"line %10d\\n" % number for number in range(first, first + 4096))
    while block:
        block = block[os.write(1, block):]
print("done", file=sys.stderr)
"""
    stem = str(layout.logs / "loud-0.0" / "1-1")
    process = await supervisor.launch(stem, [sys.executable, "-c", script], {})
    status = await until(lambda: supervisor.ended(process), 60)
    assert status.code == 0
    log = launch_of(stem)
    assert log.size() == 32 * MIB + 5
    assert log.disk()[0] < 13 * MIB
    assert supervisor.tail(stem).endswith("done\n")
    assert supervisor.output(stem).startswith("line          0\n"), "a start's first complaints are read too"

"""The span exporter's file: bounded, and shared by processes that never lose each other's lines."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.span_file import RotatingLines
from tests.real_engine import ROOT

WRITER = """
import sys
from pathlib import Path
from runtime.span_file import RotatingLines
lines = RotatingLines(Path(sys.argv[1]), 1 << 30 if sys.argv[3] == "large" else 40_000)
for number in range(400):
    lines.write(f"{sys.argv[2]} {number} " + "x" * 50 + "\\n")
lines.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces" / "worker.jsonl"


def kept(path: Path) -> Iterator[str]:
    for file in (path.with_name(f"{path.name}.1"), path):
        if file.exists():
            yield from file.read_text(encoding="utf-8").splitlines()


def test_a_file_at_its_limit_becomes_the_one_before_and_the_oldest_goes(path: Path) -> None:
    lines = RotatingLines(path, 100)
    for number in range(30):
        lines.write(f"{number:09}\n")
    lines.close()
    assert [int(text) for text in kept(path)] == list(range(10, 30))
    assert path.stat().st_size == 100
    assert path.with_name("worker.jsonl.1").stat().st_size == 100


def test_what_was_there_before_counts_and_a_large_line_is_whole(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("x" * 99 + "\n")
    lines = RotatingLines(path, 100)
    lines.write("y" * 5000 + "\n")
    lines.close()
    assert [len(text) for text in kept(path)] == [99, 5000]


def test_a_file_that_was_removed_is_made_again(path: Path) -> None:
    lines = RotatingLines(path, 1000)
    lines.write("one\n")
    path.unlink()
    lines.write("two\n")
    lines.close()
    assert list(kept(path)) == ["two"]


@pytest.mark.parametrize("limit", ["large", "small"])
def test_processes_that_write_at_once_keep_each_line_whole(path: Path, limit: str) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number), limit], cwd=ROOT) for number in range(3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = [text.split() for text in kept(path)]
    assert {text[2] for text in found} == {"x" * 50}
    numbers = {writer: [int(text[1]) for text in found if text[0] == writer] for writer in "012"}
    if limit == "large":
        assert numbers == {writer: list(range(400)) for writer in "012"}
    else:
        # The oldest go, from the front; what is kept of a writer has no hole and keeps its order.
        assert all(some == sorted(some) for some in numbers.values())
        assert sum(map(len, numbers.values())) >= 40_000 // 60

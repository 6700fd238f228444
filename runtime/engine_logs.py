"""What engines wrote, as it lies on a node's disk: launches, their segments, and reading them as one text.

agent/shim.py writes it. A launch's files are in `<data>/logs/<replica>.<rank>/`, named `<generation>-<attempt>`: its
output is `7-1.log` from the beginning and `7-1.log.<offset>` from there on; segments in the middle are removed when
there is too much.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_STEM = re.compile(r"(\d+)-(\d+)")
_FILE = re.compile(r"(\d+-\d+)\.(log|pid|exit)(?:\.(\d+))?")
CHUNK_BYTES = 256 * 1024


class Segment(NamedTuple):
    """A part of a launch's output, in one file."""

    offset: int
    path: Path


class Piece(NamedTuple):
    """Bytes of a launch's output that stand together."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Where what follows begins."""
        return self.offset + len(self.data)


class LaunchLog(NamedTuple):
    """One launch of one shard."""

    directory: Path
    generation: int
    attempt: int

    @property
    def name(self) -> str:
        """`<generation>-<attempt>`."""
        return f"{self.generation}-{self.attempt}"

    @property
    def stem(self) -> Path:
        """Path of its files without suffix."""
        return self.directory / self.name

    def segments(self) -> list[Segment]:
        """In order, as they lie there now."""
        found = [Segment(0, self.directory / f"{self.name}.log")]
        for path in self.directory.glob(f"{self.name}.log.*"):
            match = _FILE.fullmatch(path.name)
            if match is not None and match[3]:
                found.append(Segment(int(match[3]), path))
        return sorted(found)

    def files(self) -> list[Path]:
        """All that belongs to it."""
        return [*self.directory.glob(f"{self.name}.log*"), *self.directory.glob(f"{self.name}.[pe]*")]

    def disk(self) -> tuple[int, float]:
        """Bytes its files take, and when one was changed last."""
        size, changed = 0, 0.0
        for path in self.files():
            try:
                stat = path.stat()
            except OSError:
                continue
            size, changed = size + stat.st_size, max(changed, stat.st_mtime)
        return size, changed

    def ended(self) -> str:
        """`exit code 1` or `killed by signal 9`; empty while it runs, and where nobody was left to see it."""
        try:
            said = json.loads(self.stem.with_name(f"{self.name}.exit").read_text(encoding="utf-8"))
            return f"killed by signal {said['signal']}" if said["signal"] else f"exit code {said['code']}"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def read(self, position: int = 0) -> Iterator[Piece]:
        """The output from a position on, in pieces; one that begins later than the last one ended follows a gap."""
        for segment in self.segments():
            try:
                with segment.path.open("rb") as stream:
                    at = segment.offset + stream.seek(max(0, position - segment.offset))
                    while data := stream.read(CHUNK_BYTES):
                        yield Piece(at, data)
                        at += len(data)
            except OSError:
                continue  # removed meanwhile: it is part of the gap

    def size(self) -> int:
        """Bytes written in all, those that were removed included."""
        offset, path = self.segments()[-1]
        try:
            return offset + path.stat().st_size
        except OSError:
            return offset

    def head(self, limit: int) -> bytes:
        """At most so many of its first bytes."""
        return next((piece.data[:limit] for piece in self.read() if piece.offset == 0), b"")

    def tail(self, limit: int) -> bytes:
        """At most so many of its last bytes, as far as they stand together."""
        end = bytearray()
        follows = 0
        for piece in self.read(max(0, self.size() - limit)):
            if piece.offset != follows:
                end.clear()
            end += piece.data
            follows = piece.end
        return bytes(end[-limit:])


def launch_of(stem: str) -> LaunchLog:
    """The launch whose files have this path without suffix."""
    path = Path(stem)
    match = _STEM.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{stem} is no launch: its name is not <generation>-<attempt>")
    return LaunchLog(path.parent, int(match[1]), int(match[2]))


def launches(directory: Path) -> tuple[LaunchLog, ...]:
    """The launches of one shard that have files, the oldest first."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return ()
    stems = {match[1] for name in names if (match := _FILE.fullmatch(name))}
    return tuple(sorted(launch_of(str(directory / stem)) for stem in stems))


def forget(launch: LaunchLog) -> None:
    """Remove its files, and with the last launch of its shard the directory."""
    for path in launch.files():
        path.unlink(missing_ok=True)
    if launches(launch.directory):
        return
    try:
        (launch.directory / "latest").unlink(missing_ok=True)
        launch.directory.rmdir()
    except OSError:
        return  # somebody put something else there


def too_many(ended: Iterable[LaunchLog], count: int, size: int) -> list[LaunchLog]:
    """Which of these launches must go so that at most so many stay, with at most so many bytes: the oldest first."""
    by_age = sorted(((launch.disk(), launch) for launch in ended), key=lambda entry: -entry[0][1])
    going = []
    taken = 0
    for number, ((bytes_held, _), launch) in enumerate(by_age):
        taken += bytes_held
        if number >= count or taken > size:
            going.append(launch)
    return going[::-1]

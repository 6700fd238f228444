"""Shows what engines wrote on this machine: the end, all that is kept, or what they go on to write."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from cli.errors import CtlError
from cli.views import clock
from fleet.render import size
from runtime.engine_logs import LaunchLog, Piece, launches

POLL_S = 0.3
"""Between looks at a log that is followed."""
TAIL_BYTES = 16 * 1024**2
"""More than is kept of a launch behind a gap."""

Say = Callable[[Iterable[str]], None]
Note = Callable[[str], None]


def shards_of(logs: Path, replica: str) -> list[Path]:
    """The directories of a replica's shards, by rank."""
    found = [path for path in logs.glob("*.*") if path.name.rpartition(".")[0] == replica and launches(path)]
    return sorted(found, key=lambda path: path.name)


def choose(shard: Path, attempt: str, *, previous: bool) -> LaunchLog:
    """The newest launch, the one before, or the one that is named. Raises CtlError with those there are."""
    known = launches(shard)
    if attempt:
        fitting = [one for one in known if attempt in (one.name, str(one.generation))]
        if not fitting:
            raise CtlError(f"{shard.name} has no launch {attempt} here; there are: {', '.join(map(brief, known))}")
        return fitting[-1]
    if previous and len(known) < 2:
        raise CtlError(f"{shard.name} has no launch before {brief(known[-1])} here")
    return known[-2] if previous else known[-1]


def brief(launch: LaunchLog) -> str:
    """`7-1 (12 KiB, 14:03:22, exit code 1)`."""
    taken, changed = launch.disk()
    parts = (size(taken), clock(changed), launch.ended() or "running, or nobody saw its end")
    return f"{launch.name} ({', '.join(parts)})"


def last_lines(launch: LaunchLog, count: int) -> list[str]:
    """Of its output."""
    return list(deque(launch.tail(TAIL_BYTES).decode("utf-8", errors="replace").splitlines(), count))


def all_lines(launch: LaunchLog) -> Iterator[str]:
    """All that is kept, with a line where something is not."""
    reader = Reader(launch)
    yield from reader.lines()
    yield from reader.rest()


class Reader:
    """Goes through one launch's output, as far as there is any."""

    def __init__(self, launch: LaunchLog, position: int = 0) -> None:
        self.launch = launch
        self._position = position
        self._begun = b""

    def lines(self) -> Iterator[str]:
        """The whole lines that came since the last look."""
        for piece in self.launch.read(self._position):
            yield from self._gap(piece)
            *whole, self._begun = (self._begun + piece.data).split(b"\n")
            self._position = piece.end
            for line in whole:
                yield line.decode("utf-8", errors="replace").rstrip("\r")

    def rest(self) -> Iterator[str]:
        """A last line without an end."""
        if self._begun:
            yield self._begun.decode("utf-8", errors="replace")
        self._begun = b""

    def _gap(self, piece: Piece) -> Iterator[str]:
        if piece.offset > self._position:
            yield from self.rest()
            yield f"… {size(piece.offset - self._position)} of output are not kept …"


async def follow(shards: Sequence[Path], lines: int, say: Say, note: Note) -> None:
    """Say what the newest launch of each shard writes, and go on with the next launch, until cancelled."""
    readers = {shard: _at_end(launches(shard)[-1], lines, say, note) for shard in shards}
    while True:
        for shard, reader in readers.items():
            newer = [launch for launch in launches(shard) if launch > reader.launch]
            say(reader.lines())
            if newer:  # looked for first: what the older one wrote last has been said
                say(reader.rest())
                note(f"{shard.name} {newer[0].name}:")
                readers[shard] = Reader(newer[0])
        await asyncio.sleep(POLL_S)


def _at_end(launch: LaunchLog, lines: int, say: Say, note: Note) -> Reader:
    note(f"{launch.directory.name} {brief(launch)}:")
    end = launch.size()
    say(last_lines(launch, lines))
    return Reader(launch, end)

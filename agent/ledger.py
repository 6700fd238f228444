"""What runs on this node and what it was promised as, kept across the agent's death in one JSON file.

The file is `{"sha256": …, "book": …}`, replaced whole and synced at each change. The sum covers the book's bytes, so a
flipped bit is noticed where JSON alone would take it for another pid.
"""

import errno
import hashlib
import json
import logging
import os
from pathlib import Path

from activities.node_contract import ShardRef
from agent.layout import shard_key
from agent.processes import Mark
from agent.supervisor import EngineProcess
from fleet.peaks import Run
from fleet.reasons import Failure, Reason, StepError
from fleet.records import Record
from fleet.spec import Engine
from fleet.state import DeviceShare

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024**2
"""A node's ledger has some KiB; what is larger was not written by an agent."""
_BEFORE, _BETWEEN, _AFTER = b'{"sha256": "', b'", "book": ', b"}\n"


class Entry(Record):
    """One shard that was started here and not yet stopped."""

    shard: ShardRef
    model: str
    """The name clients use."""
    engine: Engine
    devices: tuple[DeviceShare, ...] = ()
    port: int
    endpoint: str
    stem: str
    """Path of its files, without suffix."""
    weights_id: str = ""
    weights_outcome: str = ""
    run: Run | None = None
    """What its memory depends on; None where an older agent started it."""
    process: EngineProcess | None = None
    """None from just before the launch until its pids are known."""
    ready: bool = False
    members: tuple[Mark, ...] = ()
    """Its processes as far as they were seen: whose GPU memory must be back at its end, also if it dies by itself."""
    lead: str = ""
    """Of a shard of a gang that opens no port: where rank 0's engine answers for all."""
    failure: Failure | None = None
    """It ended unasked, and the fleet has not taken the report yet."""


class Held(Record):
    """What an engine that was ended left behind and that would not go: its memory is not back."""

    shard: ShardRef
    process: EngineProcess
    members: tuple[Mark, ...] = ()
    """All processes it was seen to have."""
    devices: tuple[str, ...] = ()
    """UUIDs of the GPUs it ran on."""
    sentence: str
    """Who holds what."""


class Meeting(Record):
    """A port that is kept for the rendezvous of a gang of which a shard is here."""

    shard: ShardRef
    port: int


class Book(Record):
    """The file's content."""

    entries: dict[str, Entry] = {}
    """By `shard_key`."""
    started: dict[str, int] = {}
    """The highest generation each shard was asked to start."""
    stopped: dict[str, int] = {}
    """The highest generation each shard was asked to stop."""
    last_port: int = 0
    meetings: dict[str, Meeting] = {}
    """By `shard_key`, until the shard ends."""
    held: dict[str, Held] = {}
    """By the launch's stem."""


class Ledger:
    """The book, written whole and atomically at each change.

    What a full disk does not take is kept in memory and written again with the next change, or by `flush`: an engine
    must be ended and reported all the same. Only `reserve` and `note_start` raise StepError(DISK_FULL), and nothing is
    changed then: what is not written down is not started.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the directory cannot be used."""
        self._path = path
        self._stale = False
        """The file lacks the last change."""
        self.lost = False
        """There was no file, or none that could be read."""
        self.trouble = ""
        """What was wrong with the file, in a sentence; empty where nothing was."""
        self._book = self._read()

    def entries(self) -> tuple[Entry, ...]:
        """All."""
        return tuple(self._book.entries.values())

    def entry(self, shard: ShardRef) -> Entry | None:
        """The entry of this replica and rank, of whatever generation."""
        return self._book.entries.get(shard_key(shard))

    def put(self, entry: Entry) -> None:
        """Write an entry over what stood there."""
        key = shard_key(entry.shard)
        self._save(entries={**self._book.entries, key: entry})

    def reserve(self, entry: Entry) -> None:
        """Write an entry down before anything of it runs. Raises StepError(DISK_FULL)."""
        self._save(surely=True, entries={**self._book.entries, shard_key(entry.shard): entry})

    def drop(self, entry: Entry) -> None:
        """Forget an entry, unless a newer generation stands there."""
        key = shard_key(entry.shard)
        present = self._book.entries.get(key)
        if present is not None and present.shard.generation <= entry.shard.generation:
            self._save(entries={name: one for name, one in self._book.entries.items() if name != key})
            self.give_back(entry.shard)

    def started(self, shard: ShardRef) -> int:
        """The highest generation ever asked to start; 0 where none was."""
        return self._book.started.get(shard_key(shard), 0)

    def stopped(self, shard: ShardRef) -> int:
        """The highest generation ever asked to stop; 0 where none was."""
        return self._book.stopped.get(shard_key(shard), 0)

    def note_start(self, shard: ShardRef) -> None:
        """Remember a start, so that older ones are refused from now on."""
        if shard.generation > self.started(shard):
            self._save(surely=True, started={**self._book.started, shard_key(shard): shard.generation})

    def note_stop(self, shard: ShardRef) -> None:
        """Remember a stop, so that a start that was overtaken by it is refused."""
        if shard.generation > self.stopped(shard):
            self._save(stopped={**self._book.stopped, shard_key(shard): shard.generation})

    def highest_generation(self) -> int:
        """The highest generation ever asked for, of any shard."""
        return max([*self._book.started.values(), *self._book.stopped.values()], default=0)

    def next_port(self, low: int, high: int) -> list[int]:
        """The ports of the range that no entry has, beginning after the last one given out.

        A port is not given out again at once: a client may still hold the address of the engine it served before.
        """
        taken = self.given_out()
        ports = list(range(low, high + 1))
        start = ports.index(self._book.last_port) + 1 if self._book.last_port in ports else 0
        return [port for port in ports[start:] + ports[:start] if port not in taken]

    def given_out(self) -> set[int]:
        """The ports of engines, and those kept for rendezvous."""
        kept = {meeting.port for meeting in self._book.meetings.values()}
        return kept | {entry.port for entry in self._book.entries.values()}

    def note_port(self, port: int) -> None:
        """Remember a port that was given out."""
        self._save(last_port=port)

    def meeting(self, shard: ShardRef) -> int | None:
        """The port kept for this generation's rendezvous."""
        kept = self._book.meetings.get(shard_key(shard))
        return kept.port if kept is not None and kept.shard == shard else None

    def meet(self, shard: ShardRef, port: int) -> None:
        """Keep a port for a rendezvous, in place of what was kept for this replica. Raises StepError(DISK_FULL)."""
        if self.meeting(shard) != port:
            kept = Meeting(shard=shard, port=port)
            self._save(surely=True, meetings={**self._book.meetings, shard_key(shard): kept})

    def give_back(self, shard: ShardRef) -> None:
        """Keep no port for this generation or an older one any more."""
        key = shard_key(shard)
        kept = self._book.meetings.get(key)
        if kept is not None and kept.shard.generation <= shard.generation:
            self._save(meetings={name: one for name, one in self._book.meetings.items() if name != key})

    def give_back_unused(self) -> None:
        """Keep no port for a rendezvous of which nothing runs: its start, if one goes on, keeps it again."""
        running = {shard_key(entry.shard) for entry in self._book.entries.values()}
        if not self._book.meetings.keys() <= running:
            self._save(meetings={name: one for name, one in self._book.meetings.items() if name in running})

    def held(self) -> tuple[Held, ...]:
        """What would not go."""
        return tuple(self._book.held.values())

    def hold(self, held: Held) -> None:
        """Remember what would not go."""
        self._save(held={**self._book.held, held.process.stem: held})

    def release(self, held: Held) -> None:
        """It is gone after all."""
        self._save(held={stem: one for stem, one in self._book.held.items() if stem != held.process.stem})

    def flush(self) -> None:
        """Write what a full disk did not take."""
        if self._stale:
            self._save()

    def _read(self) -> Book:
        try:
            with self._path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
            return read_book(data)
        except FileNotFoundError:
            self.lost = True  # a first start, or somebody removed it: what runs here is looked for in any case
            return Book()
        except (ValueError, OSError, RecursionError) as error:
            aside = self._set_aside()
            why = str(error).splitlines()[0]
            self.trouble = f"the ledger was damaged, set aside as {aside.name}, and rebuilt from what runs"
            logger.error("%s cannot be read (%s): set aside as %s, rebuilt from what runs", self._path, why, aside)
            self.lost = True
            return Book()

    def _set_aside(self) -> Path:
        number = 1
        while (aside := self._path.with_name(f"{self._path.name}.corrupt-{number}")).exists():
            number += 1
        self._path.rename(aside)
        return aside

    def _save(self, *, surely: bool = False, **changes: object) -> None:
        book = self._book.model_copy(update=changes)
        try:
            self._write(book)
        except OSError as error:
            if surely:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                reason = Reason.DISK_FULL if full else Reason.NOT_WRITABLE
                raise StepError(reason, f"{self._path} cannot be written: {error.strerror}") from error
            if not self._stale:
                logger.error("%s cannot be written (%s): kept in memory until it can", self._path, error.strerror)
            self._stale = True
        else:
            self._stale = False
        self._book = book

    def _write(self, book: Book) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            with partial.open("wb") as stream:
                stream.write(book_bytes(book))
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)  # its bytes may be what the disk lacks
            raise
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def book_bytes(book: Book) -> bytes:
    """The file's content."""
    text = json.dumps(book.model_dump(mode="json"), indent=1).encode()
    return _BEFORE + hashlib.sha256(text).hexdigest().encode() + _BETWEEN + text + _AFTER


def read_book(data: bytes) -> Book:
    """What `book_bytes` made, or an agent before it kept sums. Raises ValueError for anything else."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    if not data.startswith(_BEFORE):
        return _read_plain(data)
    digest, between, rest = data[len(_BEFORE) :].partition(_BETWEEN)
    text = rest.removesuffix(_AFTER)
    if not between or text == rest or hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("its sum is wrong")
    return Book.model_validate_json(text)


def _read_plain(data: bytes) -> Book:
    plain = json.loads(data)
    if not isinstance(plain, dict) or "book" in plain or not {"entries", "started", "stopped"} <= plain.keys():
        raise ValueError("it is no ledger")
    return Book.model_validate(plain)

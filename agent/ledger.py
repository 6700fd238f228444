"""What runs on this node and what it was promised as, kept across the agent's death in one JSON file."""

import json
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from activities.node_contract import ShardRef
from agent.layout import shard_key
from agent.supervisor import EngineProcess
from fleet.reasons import Failure
from fleet.records import Record
from fleet.spec import Engine
from fleet.state import DeviceShare

logger = logging.getLogger(__name__)


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
    process: EngineProcess | None = None
    """None from just before the launch until its pids are known."""
    ready: bool = False
    failure: Failure | None = None
    """It ended unasked, and the fleet has not taken the report yet."""


class Book(Record):
    """The file's content."""

    entries: dict[str, Entry] = {}
    """By `shard_key`."""
    started: dict[str, int] = {}
    """The highest generation each shard was asked to start."""
    stopped: dict[str, int] = {}
    """The highest generation each shard was asked to stop."""
    last_port: int = 0


class Ledger:
    """The book, written whole and atomically at each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lost = False
        """The file was there and could not be read."""
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

    def drop(self, entry: Entry) -> None:
        """Forget an entry, unless a newer generation stands there."""
        key = shard_key(entry.shard)
        present = self._book.entries.get(key)
        if present is not None and present.shard.generation <= entry.shard.generation:
            self._save(entries={name: one for name, one in self._book.entries.items() if name != key})

    def started(self, shard: ShardRef) -> int:
        """The highest generation ever asked to start; 0 where none was."""
        return self._book.started.get(shard_key(shard), 0)

    def stopped(self, shard: ShardRef) -> int:
        """The highest generation ever asked to stop; 0 where none was."""
        return self._book.stopped.get(shard_key(shard), 0)

    def note_start(self, shard: ShardRef) -> None:
        """Remember a start, so that older ones are refused from now on."""
        if shard.generation > self.started(shard):
            self._save(started={**self._book.started, shard_key(shard): shard.generation})

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
        taken = {entry.port for entry in self._book.entries.values()}
        ports = list(range(low, high + 1))
        start = ports.index(self._book.last_port) + 1 if self._book.last_port in ports else 0
        return [port for port in ports[start:] + ports[:start] if port not in taken]

    def note_port(self, port: int) -> None:
        """Remember a port that was given out."""
        self._save(last_port=port)

    def _read(self) -> Book:
        try:
            return Book.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            self.lost = True  # a first start, or somebody removed it: what runs here is looked for in any case
            return Book()
        except (ValidationError, OSError) as error:
            aside = self._set_aside()
            logger.error("the ledger %s cannot be read and was set aside as %s: %s", self._path, aside, error)
            self.lost = True
            return Book()

    def _set_aside(self) -> Path:
        number = 1
        while (aside := self._path.with_name(f"{self._path.name}.corrupt-{number}")).exists():
            number += 1
        self._path.rename(aside)
        return aside

    def _save(self, **changes: object) -> None:
        self._book = self._book.model_copy(update=changes)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        with partial.open("w", encoding="utf-8") as stream:
            json.dump(self._book.model_dump(mode="json"), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

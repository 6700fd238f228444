"""What the fleet must be told and has not taken yet."""

import asyncio

from activities.node_contract import ShardChange, ShardHealth, ShardRef
from agent.loads import Loads


class Outbox:
    """Changes the fleet has not taken yet: per shard the latest of each kind, in order."""

    def __init__(self, loads: Loads | None = None) -> None:
        self._changes: dict[tuple[ShardRef, ShardHealth], ShardChange] = {}
        self.loads = loads or Loads()
        self.filled = asyncio.Event()
        """Set when there is something to tell."""

    def put(self, change: ShardChange) -> None:
        """Add a change."""
        self._changes[change.shard, change.health] = change
        self.filled.set()

    def pending(self) -> tuple[ShardChange, ...]:
        """All."""
        return tuple(self._changes.values())

    def taken(self, changes: tuple[ShardChange, ...]) -> None:
        """Forget what was reported, unless it has changed since."""
        for change in changes:
            if self._changes.get((change.shard, change.health)) == change:
                del self._changes[change.shard, change.health]

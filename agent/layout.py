"""Where a node keeps what, beneath `data` of its agent.yaml."""

import re
from dataclasses import dataclass
from pathlib import Path

from activities.node_contract import ShardRef
from fleet.reasons import Reason, StepError

_SAFE = re.compile(r"[a-z0-9][a-z0-9._-]{0,120}")


@dataclass(frozen=True)
class Layout:
    """The node's directory."""

    data: Path

    @property
    def ledger(self) -> Path:
        """What runs, and what was promised about it."""
        return self.data / "ledger.json"

    @property
    def lock(self) -> Path:
        """Held by the node's one agent; its pid stands beside it."""
        return self.data / "agent.lock"

    @property
    def pid(self) -> Path:
        """Pid of the agent that holds the lock."""
        return self.data / "agent.pid"

    @property
    def weights(self) -> Path:
        """One directory per `Weights.model_id`."""
        return self.data / "weights"

    @property
    def engines(self) -> Path:
        """Virtual environments."""
        return self.data / "engines"

    @property
    def logs(self) -> Path:
        """One directory per shard."""
        return self.data / "logs"

    def shard_logs(self, shard: ShardRef) -> Path:
        """Logs of one shard, one file per attempt."""
        return self.logs / shard_key(shard)


def shard_key(shard: ShardRef) -> str:
    """`<replica>.<rank>`, safe as a file's name. Raises StepError(BAD_INPUT) for any other."""
    if not _SAFE.fullmatch(shard.replica) or shard.rank < 0:
        raise StepError(Reason.BAD_INPUT, f"{shard.replica!r} is no replica's id: use a-z, 0-9, dots and dashes")
    return f"{shard.replica}.{shard.rank}"

"""Ends an engine whole: its processes, and the GPU memory they held; what will not go is held against the node.

An end is over when the processes are gone and no GPU of the shard is held by one of them. What outlives that by a
deadline (a process in the kernel's hands, a driver that hangs) must not keep the fleet from going on: the end is told,
the node is in quarantine for as long as it lasts, and it is tried again until it is gone.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from agent.gpus import Gpus
from agent.inventory import held
from agent.ledger import Entry, Held, Ledger
from agent.processes import Mark, command_name, mark
from agent.supervisor import EngineProcess, Supervisor
from fleet.reasons import StepError
from fleet.render import size
from fleet.state import CPU

logger = logging.getLogger(__name__)

RELEASE_POLL_S = 0.2
AGAIN_S = 2.0
"""Between looks at what would not go."""


class Ended(NamedTuple):
    """How an end went."""

    killed: bool
    """It did not go within the grace."""
    held: str
    """Who still holds what; empty when all is back."""


class Endings:
    """Every end of an engine on this node goes through here."""

    def __init__(
        self,
        ledger: Ledger,
        supervisor: Supervisor,
        gpus: Gpus,
        changed: Callable[[], None],
        *,
        release_wait_s: float,
    ) -> None:
        """`changed` is told when the quarantine begins, changes or ends."""
        self._ledger = ledger
        self._supervisor = supervisor
        self._gpus = gpus
        self._changed = changed
        self._release_wait_s = release_wait_s
        self._under_way: set[asyncio.Task[Ended]] = set()

    def begin(self, entry: Entry, process: EngineProcess) -> "asyncio.Task[Ended]":
        """End what an engine left that ended by itself, beside what else goes on."""
        task = asyncio.create_task(self.end(entry, process, 0), name=f"end {entry.stem}")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def end(self, entry: Entry, process: EngineProcess, grace_s: float) -> Ended:
        """End it. Never fails: what stays is held against the node."""
        devices = tuple(share.uuid for share in entry.devices if share.uuid != CPU)
        seen = {process.engine, process.shim, *entry.members, *self._supervisor.members(process)}
        killed = True
        try:
            killed = await self._supervisor.stop(process, grace_s, seen)
            sentence = await self._still_held(entry.shard.replica, devices, seen)
        except StepError as error:
            sentence = f"{error.failure.detail}: it is left of {entry.shard.replica}"
        if sentence:
            held = Held(shard=entry.shard, process=process, members=tuple(seen), devices=devices, sentence=sentence)
            self._ledger.hold(held)
            logger.error("the node is in quarantine: %s", sentence)
            self._changed()
        return Ended(killed, sentence)

    def quarantine(self) -> str:
        """Why this node takes nothing new; empty where it does."""
        return "; ".join(left.sentence for left in self._ledger.held())

    async def run(self) -> None:
        """Try again what would not go, until cancelled."""
        while True:
            for left in self._ledger.held():
                await self._again(left)
            self._ledger.flush()
            await asyncio.sleep(AGAIN_S)

    async def _again(self, left: Held) -> None:
        seen = set(left.members)
        with contextlib.suppress(StepError):  # it is known already
            await self._supervisor.stop(left.process, 0, seen)
            if not await asyncio.to_thread(self._held_by, left.devices, seen):
                self._ledger.release(left)
                logger.info("the node is out of quarantine, it is gone: %s", left.sentence)
                self._changed()

    async def _still_held(self, replica: str, devices: Collection[str], members: Collection[Mark]) -> str:
        """Wait until no GPU is held by one of these processes; a sentence where that does not come."""
        deadline = time.monotonic() + self._release_wait_s
        while found := await asyncio.to_thread(self._held_by, devices, members):
            if time.monotonic() >= deadline:
                (pid, uuid), most = max(found.items(), key=lambda entry: entry[1])
                name = command_name(pid) or "gone"
                return (
                    f"pid {pid} ({name}) of {replica} still holds {size(most) if most else 'memory'} on {uuid} "
                    f"{self._release_wait_s:.0f} s after its end"
                )
            await asyncio.sleep(RELEASE_POLL_S)
        return ""

    def _held_by(self, devices: Collection[str], members: Collection[Mark]) -> dict[tuple[int, str], int]:
        """Bytes by pid and GPU. A pid that was given to another process since is not ours."""
        if not devices:
            return {}
        ours = {member.pid: member for member in members}
        return {
            (holder.pid, uuid): holder.memory
            for uuid, holders in held(self._gpus, devices).items()
            for holder in holders
            if holder.pid in ours and mark(holder.pid) in (None, ours[holder.pid])
        }

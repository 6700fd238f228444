"""What is free on each device and disk while one plan is made: every placement takes from it, every stop gives to it.

Disk is taken once for each node and its weights, however many replicas read them, and only while the node does not
report to hold them: from then on its own measure of free disk tells.
"""

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from fleet.state import CPU, HOLDING, Device, FleetState, NodeRecord, ReplicaRecord, ReplicaState, ShardAssignment


class Free(NamedTuple):
    """A device with what is free on it; below zero where others grew into what is reserved."""

    size: int
    uuid: str
    device: Device


BY_FREE = itemgetter(0, 1)
"""Free bytes, then uuid: devices are not compared any further."""

NO_WEIGHTS: frozenset[str] = frozenset()
LEAVING = HOLDING - {ReplicaState.PLACED, ReplicaState.STARTING, ReplicaState.SERVING}
"""States in which a replica holds memory and is no copy to spread from: it is going."""


class Room:
    """Free bytes per node and device, and the copies of each model per node. Mutable: one plan's scratch paper."""

    def __init__(self, nodes: Iterable[NodeRecord], replicas: Iterable[ReplicaRecord]) -> None:
        self.nodes: tuple[NodeRecord, ...] = tuple(sorted(nodes, key=lambda node: node.id))
        """In the order of their ids, so that equal nodes are always chosen alike."""
        self._free = {node.id: {device.uuid: device.usable for device in node.inventory.devices} for node in self.nodes}
        self._devices = {node.id: _sides(node) for node in self.nodes}
        self._sorted: dict[tuple[str, bool], list[Free]] = {}
        self._disk = {node.id: node.inventory.disk_free for node in self.nodes}
        self._held = {node.id: frozenset(node.inventory.weights) for node in self.nodes}
        self._fetched: dict[tuple[str, str], tuple[int, int]] = {}
        """Node and weights → shards that read them, and bytes kept for them."""
        self._copies: dict[tuple[str, str], int] = {}
        self._leaving: dict[tuple[str, str], int] = {}
        self._changed: list[str] = []
        for replica in replicas:
            if replica.state in HOLDING:
                self.take(replica.model, replica.shards)
            if replica.state in LEAVING:
                self.leave(replica.model, replica.shards)

    def copy(self) -> "Room":
        """Another sheet with the same numbers."""
        other = Room((), ())
        other.nodes = self.nodes
        other._free = {node: dict(devices) for node, devices in self._free.items()}
        other._devices = self._devices
        other._sorted = dict(self._sorted)
        other._disk = dict(self._disk)
        other._held = self._held
        other._fetched = dict(self._fetched)
        other._copies = dict(self._copies)
        other._leaving = dict(self._leaving)
        return other

    def free(self, node: str, device: str) -> int:
        """Free bytes; below zero where foreign processes grew into what is reserved."""
        return self._free.get(node, {}).get(device, 0)

    def by_free(self, node: str, on_cpu: bool) -> list[Free]:
        """One node's RAM, or its GPUs, the fullest first; kept until something changes there, so not to be changed."""
        key = node, on_cpu
        found = self._sorted.get(key)
        if found is None:
            left = self._free[node]
            found = [Free(left.get(device.uuid, 0), device.uuid, device) for device in self._devices[node][not on_cpu]]
            found.sort(key=BY_FREE)
            self._sorted[key] = found
        return found

    def holds(self, node: str, weights: str) -> bool:
        """Whether the node reports to have these weights whole."""
        return weights in self._held.get(node, NO_WEIGHTS)

    def disk(self, node: str, weights: str) -> int | None:
        """Bytes of disk free for weights; None where they are there or on their way, and need no more.

        Below zero more is promised than there is, because some of it is to go. Who then joined those that read what
        goes would keep it there, and what the room is made for would never come.
        """
        free = self._disk.get(node, 0)
        if weights in self._held.get(node, NO_WEIGHTS) or (free >= 0 and (node, weights) in self._fetched):
            return None
        return free

    def disk_kept(self, node: str) -> int:
        """Bytes of disk kept for weights that this node does not hold yet."""
        return sum(size for (where, _), (_, size) in self._fetched.items() if where == node)

    def copies(self, model: str, node: str) -> int:
        """Shards of this model on this node that stay there."""
        return self._copies.get((model, node), 0) - self._leaving.get((model, node), 0)

    @property
    def moment(self) -> int:
        """Grows with every change; `changed_since` takes it."""
        return len(self._changed)

    def changed_since(self, moment: int) -> set[str]:
        """The nodes on which something was taken or given since: what was judged there is judged again."""
        return set(self._changed[moment:])

    def take(self, model: str, shards: Iterable[ShardAssignment]) -> None:
        """Reserve."""
        self._move(model, shards, -1)

    def give(self, model: str, shards: Iterable[ShardAssignment]) -> None:
        """Free what was reserved."""
        self._move(model, shards, 1)

    def leave(self, model: str, shards: Iterable[ShardAssignment]) -> None:
        """What is reserved will be free, and holds it until then."""
        self._leave(model, shards, 1)

    def left(self, model: str, shards: Iterable[ShardAssignment]) -> None:
        """Free what was to leave."""
        self._leave(model, shards, -1)
        self.give(model, shards)

    def _leave(self, model: str, shards: Iterable[ShardAssignment], count: int) -> None:
        for shard in shards:
            self._leaving[model, shard.node] = self._leaving.get((model, shard.node), 0) + count
            self._changed.append(shard.node)

    def _move(self, model: str, shards: Iterable[ShardAssignment], sign: int) -> None:
        for shard in shards:
            self._copies[model, shard.node] = self._copies.get((model, shard.node), 0) - sign
            self._changed.append(shard.node)
            self._sorted.pop((shard.node, True), None)
            self._sorted.pop((shard.node, False), None)
            devices = self._free.setdefault(shard.node, {})
            for share in shard.devices:
                devices[share.uuid] = devices.get(share.uuid, 0) + sign * share.memory
            if shard.weights not in self._held.get(shard.node, NO_WEIGHTS):
                self._keep_disk(shard, -sign)

    def _keep_disk(self, shard: ShardAssignment, count: int) -> None:
        key = shard.node, shard.weights
        before, size = self._fetched.get(key, (0, shard.disk))
        if before == 0:
            self._disk[shard.node] = self._disk.get(shard.node, 0) - size
        self._fetched[key] = before + count, size
        if before + count == 0:
            self._disk[shard.node] += size
            del self._fetched[key]


def _sides(node: NodeRecord) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    devices = node.inventory.devices
    return (
        tuple([device for device in devices if device.uuid == CPU]),
        tuple([device for device in devices if device.uuid != CPU]),
    )


def room_of(state: FleetState) -> Room:
    """What is free now."""
    return Room(state.nodes.values(), state.replicas.values())

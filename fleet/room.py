"""What is free on each device while one plan is made: every placement takes from it, every stop gives to it."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from fleet.state import HOLDING, FleetState, NodeRecord, ReplicaRecord, ShardAssignment

NOTHING: Mapping[str, int] = MappingProxyType({})


class Room:
    """Free bytes per node and device, and the copies of each model per node. Mutable: one plan's scratch paper."""

    def __init__(self, nodes: Iterable[NodeRecord], replicas: Iterable[ReplicaRecord]) -> None:
        self.nodes: tuple[NodeRecord, ...] = tuple(sorted(nodes, key=lambda node: node.id))
        """In the order of their ids, so that equal nodes are always chosen alike."""
        self._free = {node.id: {device.uuid: device.usable for device in node.inventory.devices} for node in self.nodes}
        self._copies: dict[tuple[str, str], int] = {}
        self._changed: list[str] = []
        for replica in replicas:
            if replica.state in HOLDING:
                self.take(replica.model, replica.shards)

    def copy(self) -> "Room":
        """Another sheet with the same numbers."""
        other = Room((), ())
        other.nodes = self.nodes
        other._free = {node: dict(devices) for node, devices in self._free.items()}
        other._copies = dict(self._copies)
        return other

    def free(self, node: str, device: str) -> int:
        """Free bytes; below zero where foreign processes grew into what is reserved."""
        return self._free.get(node, {}).get(device, 0)

    def free_on(self, node: str) -> Mapping[str, int]:
        """Free bytes of each device of one node; not to be kept, as it changes."""
        return self._free.get(node, NOTHING)

    def copies(self, model: str, node: str) -> int:
        """Shards of this model that hold memory on this node."""
        return self._copies.get((model, node), 0)

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

    def _move(self, model: str, shards: Iterable[ShardAssignment], sign: int) -> None:
        for shard in shards:
            self._copies[model, shard.node] = self.copies(model, shard.node) - sign
            self._changed.append(shard.node)
            devices = self._free.setdefault(shard.node, {})
            for share in shard.devices:
                devices[share.uuid] = devices.get(share.uuid, 0) + sign * share.memory


def room_of(state: FleetState) -> Room:
    """What is free now."""
    return Room(state.nodes.values(), state.replicas.values())

"""Which nodes one shard of a model fits, were they empty; and the smallest parallelism with which it fits any."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from fleet.devices import most_gpus, suiting
from fleet.estimate import Estimate, estimate
from fleet.records import Record
from fleet.render import size
from fleet.room import Room, room_of
from fleet.shape import ModelShape
from fleet.spec import Engine, ShardNeed
from fleet.state import FleetState, NodeRecord, NodeState

MAX_NODES = 8
"""Nodes of one replica that are tried: more are built on purpose, by people who know their number."""


class FitVerdict(StrEnum):
    """Whether one shard fits any node of the fleet when that node is empty."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"


class Parallelism(Record):
    """How a replica is divided: tensor parallel over all its GPUs, or by layers where llama.cpp does it."""

    gpus: int
    """On each node."""
    nodes: int
    memory: int
    """Bytes on each GPU."""
    fits: int
    """Nodes that have so much when they are empty."""

    @property
    def sentence(self) -> str:
        """`2 GPUs with 43 GiB each (1 node has that): --gpus 2`."""
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} with {size(self.memory)}"
        each = " each" if self.gpus > 1 else ""
        over = f" on each of {self.nodes} nodes" if self.nodes > 1 else ""
        have = "1 node has" if self.fits == 1 else f"{self.fits} nodes have"
        flags = f"--gpus {self.gpus}" + (f" --nodes {self.nodes}" if self.nodes > 1 else "")
        return f"{gpus}{each}{over} ({have} that): {flags}"


@dataclass(frozen=True)
class Judgement:
    """A need against the fleet's nodes, each as if it were empty."""

    verdict: FitVerdict
    sentence: str
    candidate: str = ""
    """A ready node that could take it, the one with most free; empty where there is none just now."""


def judge(
    state: FleetState, name: str, engine: Engine, need: ShardNeed, shards: int = 1, silent: Collection[str] = ()
) -> Judgement:
    """Whether so many members that offer the engine could each run such a shard if empty; none at all is not a no.

    `silent`: nodes that were asked and did not answer; one of them is the candidate only where nobody else is.
    """
    wanted = f"{name} needs {_need(need)}{f' on each of {shards} nodes' if shards > 1 else ''}"
    members = [node for node in state.nodes.values() if node.state is not NodeState.LOST]
    offering = offers(state, engine)
    if not offering:
        why = f"no node offers {engine} yet" if members else "no node has joined yet"
        return Judgement(FitVerdict.UNKNOWN, f"{why}; {wanted}")
    fitting = [node for node in offering if _fits(node, need)]
    if not fitting:
        return Judgement(FitVerdict.DOES_NOT_FIT, f"{wanted} for one shard, {_largest(offering, need)}")
    if len(fitting) < shards:
        few = f"{len(fitting)} of the {len(offering)} nodes that offer {engine} could take a shard"
        return Judgement(FitVerdict.DOES_NOT_FIT, f"{wanted}, {few}")
    free = room_of(state)
    ready = [node for node in fitting if node.state is NodeState.READY]
    best = max(ready, key=lambda node: (node.id not in silent, _free(node, need, free), node.id), default=None)
    total = len(offering)
    nodes = f"{fitting[0].id}" if total == 1 else f"{len(fitting)} of {total} nodes"
    return Judgement(FitVerdict.FITS, f"{wanted}; fits {nodes}", best.id if best else "")


def offers(state: FleetState, engine: Engine) -> list[NodeRecord]:
    """The members that have an engine, or can install it."""
    members = (node for node in state.nodes.values() if node.state is not NodeState.LOST)
    return [node for node in members if any(offer.engine is engine for offer in node.inventory.engines)]


def smallest(
    state: FleetState,
    shape: ModelShape,
    engine: Engine,
    *,
    context_length: int,
    concurrency: int,
    disk: int,
    args: tuple[str, ...] = (),
) -> Parallelism | None:
    """The fewest nodes, then the fewest GPUs of each, with which a replica fits; None where nothing does.

    Tensor parallel sizes divide the attention heads, as vLLM and SGLang demand; llama.cpp gives whole layers to each
    GPU of one node.
    """
    offering = offers(state, engine)
    most = max((gpus_of(node) for node in offering), default=0)
    for nodes in range(1, min(MAX_NODES, len(offering)) + 1 if engine is not Engine.LLAMACPP else 2):
        for gpus in range(1, most + 1):
            if not _divides(shape, engine, gpus * nodes):
                continue
            found = estimate(
                shape,
                engine,
                context_length=context_length,
                concurrency=concurrency,
                gpus=gpus,
                nodes=nodes,
                args=args,
            )
            if not isinstance(found, Estimate):
                return None
            need = ShardNeed(memory=found.total, gpus=gpus, disk=disk)
            fits = sum(_fits(node, need) for node in offering)
            if fits >= nodes:
                return Parallelism(gpus=gpus, nodes=nodes, memory=found.total, fits=fits)
    return None


def _divides(shape: ModelShape, engine: Engine, parts: int) -> bool:
    if engine is Engine.LLAMACPP:
        return parts <= len(shape.layers)
    return parts == 1 or (shape.heads > 0 and shape.heads % parts == 0)


def _devices(node: NodeRecord, need: ShardNeed) -> list[tuple[str, int]]:
    """Uuid and capacity of the devices such a shard can use, the largest first."""
    wanted = suiting(node.inventory.devices, need.gpus)
    return sorted(((device.uuid, device.total) for device in wanted), key=lambda device: -device[1])


def gpus_of(node: NodeRecord) -> int:
    """How many GPUs of a node one shard can have."""
    return most_gpus(node.inventory.devices)


def _capacity(node: NodeRecord, need: ShardNeed) -> int:
    """What the last of the devices it needs has; 0 where the node has too few."""
    devices = _devices(node, need)
    wanted = max(1, need.gpus)
    return devices[wanted - 1][1] if len(devices) >= wanted else 0


def _fits(node: NodeRecord, need: ShardNeed) -> bool:
    return _capacity(node, need) >= max(1, need.memory) and need.disk <= node.inventory.disk_total


def _free(node: NodeRecord, need: ShardNeed, room: Room) -> int:
    amounts = sorted((room.free(node.id, uuid) for uuid, _ in _devices(node, need)), reverse=True)
    return amounts[max(1, need.gpus) - 1]


def _need(need: ShardNeed) -> str:
    return f"{need.gpus} GPUs with {size(need.memory)} each" if need.gpus > 1 else size(need.memory)


def _largest(nodes: list[NodeRecord], need: ShardNeed) -> str:
    """What the nodes have instead: the memory of the largest, or the GPUs or the disk that nobody has."""
    best = max(nodes, key=lambda node: (_capacity(node, need), node.id))
    capacity = _capacity(best, need)
    if not capacity:
        most = max(nodes, key=lambda node: (len(_devices(node, need)), node.id))
        found = len(_devices(most, need))
        sliced = any(len(suiting(node.inventory.devices, 1)) > len(_devices(node, need)) for node in nodes)
        return f"the node with most {'whole ' if sliced else ''}GPUs, {most.id}, has {found}"
    if capacity < need.memory:
        return f"the largest node {best.id} has {size(capacity)}"
    disk = max((node for node in nodes if _capacity(node, need) >= need.memory), key=lambda n: n.inventory.disk_total)
    return f"and {size(need.disk)} of disk for its weights, the node {disk.id} has {size(disk.inventory.disk_total)}"

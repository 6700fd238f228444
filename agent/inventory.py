"""What a node has, as measured now: memory by device, disk, engines, weights; and who holds the memory of a GPU."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from agent.gpus import Gpus, Holder, device
from agent.install import Installs
from agent.ledger import Entry
from agent.machine import Machine
from agent.processes import own_memory
from agent.weights import WeightStore
from fleet.state import CPU, Device, Inventory
from runtime import VERSION
from runtime.config import AgentConfig

NOTABLE = 0.05
"""A share of the total: smaller changes of foreign memory and disk do not matter to placement."""


def measure(
    config: AgentConfig,
    machine: Machine,
    installs: Installs,
    weights: WeightStore,
    ours: Collection[int],
    reserved: Mapping[str, int],
    root: Path,
) -> Inventory:
    """Measure the node. `ours` are the pids of our engines, `reserved` the bytes they may hold on each device by uuid;
    `root` is on the disk that keeps the weights."""
    ram = machine.ram()
    budget = int(config.memory) if config.memory is not None else ram.total
    root.mkdir(parents=True, exist_ok=True)
    disk = machine.disk(root)
    cpu = Device(
        uuid=CPU,
        model=machine.cpu_model(),
        total=budget,
        foreign=foreign(budget, sum(map(own_memory, ours)), ram.free),
    )
    gpus = tuple(device(gpu, ours, reserved.get(gpu.uuid, 0)) for gpu in machine.gpus())
    return Inventory(
        address=config.address,
        devices=(cpu, *gpus),
        engines=installs.offers(),
        cpus=machine.cpus(),
        disk_total=disk.total,
        disk_free=weights.room(disk.free - int(config.keep_free)),
        weights=weights.held(),
        labels=config.labels,
        roles=config.roles,
        trust_remote_code=config.trust_remote_code,
        version=VERSION,
    )


def held(gpus: Gpus, uuids: Collection[str]) -> dict[str, tuple[Holder, ...]]:
    """Which of these GPUs hold memory just now, and whose: the largest holder first.

    A device that nobody holds, and one that cannot be asked, is not in the answer. To know whether an engine gave its
    memory back, look for its pids.
    """
    return {gpu.uuid: gpu.holders for gpu in gpus() if gpu.uuid in uuids and gpu.holders}


def reserved(entries: Iterable[Entry]) -> dict[str, int]:
    """Bytes that the engines of these entries may hold on each device, by uuid."""
    found: dict[str, int] = {}
    for entry in entries:
        if entry.process is not None and entry.failure is None:
            for share in entry.devices:
                found[share.uuid] = found.get(share.uuid, 0) + share.memory
    return found


def foreign(budget: int, ours: int, available: int) -> int:
    """Bytes of our budget that others hold: what we may still take, less what is there to be taken.

    With all RAM as the budget that is what others use; a smaller budget is whole as long as its rest is available.
    """
    return min(budget, max(0, budget - ours - available))


def notable(before: Inventory, now: Inventory) -> bool:
    """Whether the difference matters to placement."""
    if before.model_copy(update={"devices": (), "disk_free": 0}) != now.model_copy(
        update={"devices": (), "disk_free": 0}
    ):
        return True
    if abs(before.disk_free - now.disk_free) > NOTABLE * now.disk_total:
        return True
    was = {device.uuid: device for device in before.devices}
    return any(
        device.uuid not in was
        or was[device.uuid].total != device.total
        or abs(was[device.uuid].foreign - device.foreign) > NOTABLE * device.total
        for device in now.devices
    ) or len(was) != len(now.devices)

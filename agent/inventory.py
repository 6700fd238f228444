"""What a node has, as measured now: memory by device, disk, engines, weights."""

import importlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from agent.install import Installs
from agent.processes import own_memory
from agent.weights import WeightStore
from fleet.state import CPU, Device, Inventory
from runtime import VERSION
from runtime.config import AgentConfig

NOTABLE = 0.05
"""A share of the total: smaller changes of foreign memory and disk do not matter to placement."""
_CGROUP = Path("/sys/fs/cgroup")


def measure(
    config: AgentConfig, installs: Installs, weights: WeightStore, ours: Collection[int], root: Path
) -> Inventory:
    """Measure the node. `ours` are the pids of our engines; `root` is on the disk that keeps the weights."""
    total, available = ram()
    budget = int(config.memory) if config.memory is not None else total
    root.mkdir(parents=True, exist_ok=True)
    disk = shutil.disk_usage(root)
    cpu = Device(
        uuid=CPU, model=cpu_model(), total=budget, foreign=foreign(budget, sum(map(own_memory, ours)), available)
    )
    return Inventory(
        address=config.address,
        devices=(cpu, *gpus(ours)),
        engines=installs.offers(),
        cpus=len(os.sched_getaffinity(0)),
        disk_total=disk.total,
        disk_free=max(0, disk.free - int(config.keep_free)),
        weights=weights.held(),
        labels=config.labels,
        roles=config.roles,
        version=VERSION,
    )


def foreign(budget: int, ours: int, available: int) -> int:
    """Bytes of our budget that others hold: what we may still take, less what is there to be taken.

    With all RAM as the budget that is what others use; a smaller budget is whole as long as its rest is available.
    """
    return min(budget, max(0, budget - ours - available))


def ram() -> tuple[int, int]:
    """Total and available bytes of RAM, of the container's share where there is one."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is None or used is None or limit >= memory.total:
        return memory.total, memory.available
    reclaimable = _cgroup_stat("inactive_file") + _cgroup_stat("active_file")
    return limit, min(memory.available, max(0, limit - max(0, used - reclaimable)))


def cpu_model() -> str:
    """Such as `AMD EPYC 7B13`; empty where the kernel does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def gpus(ours: Collection[int]) -> tuple[Device, ...]:
    """NVIDIA GPUs, where `nvidia-ml-py` is installed and a driver answers; none otherwise."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()  # the library is there, a driver is not
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_gpu(nvml, handle, ours) for handle in handles)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


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


def _gpu(nvml: Any, handle: Any, ours: Collection[int]) -> Device:
    others = {
        int(process.pid): int(process.usedGpuMemory or 0)  # None where the driver does not tell a container
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid not in ours
    }
    return Device(
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        model=str(nvml.nvmlDeviceGetName(handle)),
        total=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        foreign=sum(others.values()),
        holders=tuple(sorted(others, key=lambda pid: -others[pid])),
    )


def _cgroup_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cgroup_stat(key: str) -> int:
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)

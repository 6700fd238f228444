"""The machine an agent runs on: its memory, processors, disk and GPUs, as measured or as a file says."""

import logging
import os
import shutil
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import psutil
from pydantic import ByteSize, Field, model_validator

from agent.gpus import Gpu, Gpus, Holder, Nvidia
from fleet.state import CPU
from runtime.config import ConfigError, Section, load

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")


class Amount(NamedTuple):
    """Bytes in all, and free."""

    total: int
    free: int


class Machine(Protocol):
    """What is asked of it; each call is a new look."""

    def ram(self) -> Amount:
        """Memory, of the container's share where there is one."""

    def cpu_model(self) -> str:
        """Such as `AMD EPYC 7B13`; empty where nobody says."""

    def cpus(self) -> int:
        """Processors this process may use."""

    def disk(self, path: Path) -> Amount:
        """The disk that this directory is on."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Devices engines can be given."""


class ThisMachine:
    """The `Machine` itself."""

    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus: Gpus = gpus or Nvidia()

    def ram(self) -> Amount:
        """As the kernel says."""
        memory = psutil.virtual_memory()
        limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
        if limit is None or used is None or limit >= memory.total:
            return Amount(memory.total, memory.available)
        reclaimable = _cgroup_stat("inactive_file") + _cgroup_stat("active_file")
        return Amount(limit, min(memory.available, max(0, limit - max(0, used - reclaimable))))

    def cpu_model(self) -> str:
        """As the kernel says."""
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")

    def cpus(self) -> int:
        """Those this process is bound to."""
        return len(os.sched_getaffinity(0))

    def disk(self, path: Path) -> Amount:
        """As the file system says."""
        found = shutil.disk_usage(path)
        return Amount(found.total, found.free)

    def gpus(self) -> tuple[Gpu, ...]:
        """As the driver says."""
        return self._gpus()


class ProcessSection(Section):
    """A process that has memory on a GPU."""

    pid: Annotated[int, Field(gt=0)]
    memory: ByteSize


class GpuSection(Section):
    """One GPU, or one MIG slice."""

    uuid: Annotated[str, Field(min_length=1)]
    model: str = ""
    total: Annotated[ByteSize, Field(gt=0)]
    processes: tuple[ProcessSection, ...] = ()


class InventoryFile(Section):
    """What stands in `inventory_file`. What is left out is measured, but for GPUs: then there are none."""

    memory: Annotated[ByteSize, Field(gt=0)] | None = None
    memory_used: ByteSize = ByteSize(0)
    cpu_model: str = ""
    cpus: Annotated[int, Field(ge=1)] | None = None
    disk: Annotated[ByteSize, Field(gt=0)] | None = None
    disk_used: ByteSize = ByteSize(0)
    gpus: tuple[GpuSection, ...] = ()

    @model_validator(mode="after")
    def _told_apart(self) -> "InventoryFile":
        uuids = [gpu.uuid for gpu in self.gpus]
        twice = sorted({uuid for uuid in uuids if uuids.count(uuid) > 1})
        if twice:
            raise ValueError(f"two GPUs have the uuid {twice[0]}: give each its own")
        if CPU in uuids:
            raise ValueError(f"the uuid {CPU} stands for the RAM: give the GPU another")
        return self


class WrittenMachine:
    """A `Machine` that a file describes, for tests and for trying out plans; the file is read anew at each look."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError with file and line."""
        self._path = path
        self._last = load(path, InventoryFile)
        self._trouble = ""
        self._real = ThisMachine(lambda: ())

    def ram(self) -> Amount:
        """As written."""
        said = self._read()
        return self._real.ram() if said.memory is None else _amount(said.memory, said.memory_used)

    def cpu_model(self) -> str:
        """As written."""
        return self._read().cpu_model or self._real.cpu_model()

    def cpus(self) -> int:
        """As written."""
        return self._read().cpus or self._real.cpus()

    def disk(self, path: Path) -> Amount:
        """As written, whatever the path."""
        said = self._read()
        return self._real.disk(path) if said.disk is None else _amount(said.disk, said.disk_used)

    def gpus(self) -> tuple[Gpu, ...]:
        """As written."""
        return tuple(_gpu(section) for section in self._read().gpus)

    def _read(self) -> InventoryFile:
        """What the file says now; what it said last where somebody spoils it while the agent runs."""
        try:
            self._last = load(self._path, InventoryFile)
            self._trouble = ""
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("%s; what it said before stays", error)
        return self._last


def _gpu(section: GpuSection) -> Gpu:
    holders = sorted((Holder(one.pid, int(one.memory)) for one in section.processes), key=lambda one: -one.memory)
    used = sum(holder.memory for holder in holders)
    return Gpu(section.uuid, section.model, int(section.total), min(used, int(section.total)), tuple(holders))


def _amount(total: int, used: int) -> Amount:
    return Amount(int(total), max(0, int(total) - int(used)))


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

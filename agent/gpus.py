"""The GPUs of a node as NVIDIA's library tells them: how large each is, what is used, and by which process."""

import importlib
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleet.state import Device

logger = logging.getLogger(__name__)


class Holder(NamedTuple):
    """A process that has memory on a device."""

    pid: int
    memory: int
    """Bytes; 0 where the driver does not say, as inside some containers."""


@dataclass(frozen=True)
class Gpu:
    """One device an engine can be given: a whole GPU, or a MIG slice of one. Sizes are bytes."""

    uuid: str
    """As `CUDA_VISIBLE_DEVICES` takes it: `GPU-…` or `MIG-…`."""
    model: str
    total: int
    """Without what the driver keeps for itself."""
    used: int
    """By anybody."""
    holders: tuple[Holder, ...] = ()
    """The largest first."""

    @property
    def free(self) -> int:
        """What could be taken now."""
        return max(0, self.total - self.used)


Gpus = Callable[[], tuple[Gpu, ...]]
"""Measures the node's GPUs now; empty where it has none."""


class Nvidia:
    """Measures by NVML. A device that cannot be asked is left out, which is said once; the others are there."""

    def __init__(self, library: Callable[[], Any | None] = lambda: nvml_library()) -> None:
        self._library = library
        self._said: frozenset[str] = frozenset()

    def __call__(self) -> tuple[Gpu, ...]:
        """None where there is no library or no driver: then the node has a CPU only."""
        nvml = self._library()
        if nvml is None:
            return ()
        try:
            nvml.nvmlInit()
        except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
            return ()  # the package is there, a driver is not
        except _errors(nvml) as error:
            self._say({f"no GPU can be used: {error}"})
            return ()
        troubles: set[str] = set()
        try:
            found = tuple(self._devices(nvml, troubles))
        finally:
            nvml.nvmlShutdown()
        self._say(troubles)
        return found

    def _devices(self, nvml: Any, troubles: set[str]) -> Iterator[Gpu]:
        with _noted(nvml, "the GPUs cannot be counted", troubles):
            for index in range(nvml.nvmlDeviceGetCount()):
                with _noted(nvml, f"GPU {index} is left out", troubles):
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    if _divided(nvml, handle):
                        yield from self._slices(nvml, handle, index, troubles)
                    else:
                        yield _measured(nvml, handle)

    def _slices(self, nvml: Any, handle: Any, gpu: int, troubles: set[str]) -> Iterator[Gpu]:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with _noted(nvml, f"slice {index} of GPU {gpu} is left out", troubles):
                try:
                    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                except nvml.NVMLError_NotFound:
                    continue  # numbers have gaps where slices could be and are not
                yield _measured(nvml, part)

    def _say(self, troubles: set[str]) -> None:
        for trouble in sorted(troubles - self._said):
            logger.warning("%s", trouble)
        self._said = frozenset(troubles)


def nvml_library() -> Any | None:
    """The package nvidia-ml-py; None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def device(gpu: Gpu, ours: Collection[int], reserved: int) -> Device:
    """A GPU as the fleet knows it. `ours` are the pids of our engines, `reserved` is what they may hold on it.

    What others hold is what is used and not ours: also memory that no process is named for. Where the driver does not
    show our engines, as to an agent in a container, they count as holding what is reserved for them.
    """
    mine = sum(holder.memory for holder in gpu.holders if holder.pid in ours)
    others = tuple(holder for holder in gpu.holders if holder.pid not in ours)
    known = sum(holder.memory for holder in others)
    return Device(
        uuid=gpu.uuid,
        model=gpu.model,
        total=gpu.total,
        foreign=min(gpu.total, max(known, gpu.used - (mine or reserved), 0)),
        holders=tuple(holder.pid for holder in others),
    )


@contextmanager
def _noted(nvml: Any, what: str, troubles: set[str]) -> Iterator[None]:
    try:
        yield
    except _errors(nvml) as error:
        troubles.add(f"{what}: {error}")


def _errors(nvml: Any) -> tuple[type[Exception], ...]:
    """What its calls raise; a call that an old driver lacks raises something of its own."""
    return nvml.NVMLError, nvml.NVMLLibraryMismatchError


def _divided(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except _errors(nvml):
        return False  # this kind of GPU cannot be divided
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _measured(nvml: Any, handle: Any) -> Gpu:
    total, used = _memory(nvml, handle)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        model=_text(nvml.nvmlDeviceGetName(handle)),
        total=total,
        used=used,
        holders=_holders(nvml, handle),
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except _errors(nvml):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)  # a driver before 510 counts its own share as used
        return int(memory.total), int(memory.used)
    return int(memory.total) - int(memory.reserved), int(memory.used)


def _holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    found: dict[int, int] = {}
    for listed in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        try:
            processes = listed(handle)
        except _errors(nvml):
            continue  # not every device has every list; what is used is known all the same
        for process in processes:
            pid, memory = int(process.pid), int(process.usedGpuMemory or 0)  # None where the driver does not say
            found[pid] = max(found.get(pid, 0), memory)  # one that computes and draws stands in two lists
    return tuple(sorted((Holder(pid, memory) for pid, memory in found.items()), key=lambda one: (-one.memory, one.pid)))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)

# ruff: noqa: N802, N815 -- the stand-in has the library's own names
"""GPUs by NVML, against a stand-in with its function names, structures and errors; no GPU is needed."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.gpus import Gpu, Holder, Nvidia, device, nvml_library
from agent.probe import Probe
from fleet.reasons import Reason, StepError
from fleet.state import Device, DeviceShare
from tests.fake_engines.node import FakeNode

GIB = 1024**3
MIB = 1024**2
H100 = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class Card:
    """What one handle answers; an exception is raised instead."""

    uuid: str | bytes | Exception
    name: str = H100
    total: int = 80 * GIB
    reserved: int = 0
    used: int = 0
    compute: tuple[tuple[int, int | None], ...] | Exception = ()
    graphics: tuple[tuple[int, int | None], ...] | Exception = ()
    mig: tuple[int, int] | Exception = field(default_factory=lambda: pynvml.NVMLError_NotSupported())
    slices: tuple["Card | Exception", ...] = ()
    old: bool = False
    """Its driver has the first version of the memory structure only."""


@dataclass
class FakeNvml:
    """The functions of pynvml that are used, on cards."""

    cards: tuple[Card | Exception, ...] = ()
    on_init: Exception | None = None
    open: int = 0

    NVMLError = pynvml.NVMLError
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def nvmlInit(self) -> None:
        if self.on_init is not None:
            raise self.on_init
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return _given(self.cards[index])

    def nvmlDeviceGetUUID(self, card: Card) -> Any:
        return _given(card.uuid)

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> Any:
        if version is None:
            memory = pynvml.c_nvmlMemory_t()
            memory.total, memory.used, memory.free = card.total, card.used + card.reserved, 0
            return memory
        if card.old:
            raise pynvml.NVMLError_FunctionNotFound
        memory = pynvml.c_nvmlMemory_v2_t()
        memory.total, memory.reserved, memory.used, memory.free = card.total, card.reserved, card.used, 0
        return memory

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:
        return _processes(card.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[Any]:
        return _processes(card.graphics)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, card: Card) -> list[Any]:
        raise pynvml.NVMLLibraryMismatchError("an old driver")

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        return list(_given(card.mig))

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return len(card.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Any:
        return _given(card.slices[index])


def _given(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def _processes(listed: Any) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=None) for pid, memory in _given(listed)]


def read(*cards: Card | Exception) -> tuple[Gpu, ...]:
    nvml = FakeNvml(cards)
    found = Nvidia(lambda: nvml)()
    assert nvml.open == 0
    return found


def test_the_stand_in_has_what_the_library_has() -> None:
    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    assert nvml_library() is pynvml


def test_whole_gpus() -> None:
    first = Card(
        "GPU-1", reserved=GIB, used=10 * GIB, compute=((7, 6 * GIB), (8, 3 * GIB)), graphics=((8, GIB), (9, None))
    )
    old = Card(b"GPU-2", name="Tesla T4", total=16 * GIB, reserved=GIB, used=2 * GIB, old=True)
    assert read(first, old) == (
        Gpu("GPU-1", H100, 79 * GIB, 10 * GIB, (Holder(7, 6 * GIB), Holder(8, 3 * GIB), Holder(9, 0))),
        Gpu("GPU-2", "Tesla T4", 16 * GIB, 3 * GIB),
    )  # fmt: skip


def test_a_divided_gpu_is_its_slices() -> None:
    part = Card("MIG-a", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total=10 * GIB, used=GIB, compute=((7, GIB),))
    slices = (part, pynvml.NVMLError_NotFound(), replace(part, uuid="MIG-b", compute=()))
    gpu = Card("GPU-1", mig=(1, 1), slices=slices)
    assert [(one.uuid, one.total, one.holders) for one in read(gpu, Card("GPU-2", mig=(0, 1)))] == [
        ("MIG-a", 10 * GIB, (Holder(7, GIB),)),
        ("MIG-b", 10 * GIB, ()),
        ("GPU-2", 80 * GIB, ()),
    ]


def test_one_that_fails_does_not_hide_the_others_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    lost = pynvml.NVMLError_GpuIsLost()
    bad_slice = Card("GPU-3", mig=(1, 1), slices=(lost, Card("MIG-b")))
    nvml = FakeNvml((lost, Card(lost), Card("GPU-2", compute=pynvml.NVMLError_NoPermission(), used=GIB), bad_slice))
    nvidia = Nvidia(lambda: nvml)
    for _ in range(2):
        assert [(gpu.uuid, gpu.used) for gpu in nvidia()] == [("GPU-2", GIB), ("MIG-b", 0)]
    assert [record.message for record in caplog.records] == [
        "GPU 0 is left out: GPU is lost",
        "GPU 1 is left out: GPU is lost",
        "slice 0 of GPU 3 is left out: GPU is lost",
    ]
    nvml.cards = (Card("GPU-1"),)
    assert len(nvidia()) == 1
    nvml.cards = (lost,)
    assert nvidia() == ()
    assert len(caplog.records) == 4, "what was well in between is told again"


def test_without_library_or_driver_there_is_a_cpu_only(caplog: pytest.LogCaptureFixture) -> None:
    assert Nvidia(lambda: None)() == ()
    for missing in (pynvml.NVMLError_LibraryNotFound(), pynvml.NVMLError_DriverNotLoaded()):
        nvml = FakeNvml((Card("GPU-1"),), on_init=missing)
        assert Nvidia(partial(lambda one: one, nvml))() == ()
    assert caplog.records == []
    broken = FakeNvml(on_init=pynvml.NVMLError_LibRmVersionMismatch())
    assert Nvidia(lambda: broken)() == ()
    assert [record.message.split(":")[0] for record in caplog.records] == ["no GPU can be used"]


GPU = Gpu("GPU-1", H100, 80, 50, (Holder(7, 30), Holder(8, 10)))


@pytest.mark.parametrize(
    ("gpu", "ours", "reserved", "foreign", "holders"),
    [
        (GPU, (), 0, 50, (7, 8)),  # ten are nobody's: the driver's, or a process that is not shown
        (GPU, (7,), 30, 20, (8,)),
        (GPU, (7,), 60, 20, (8,)),  # ours uses less than it may
        (GPU, (7, 8), 40, 10, ()),
        (replace(GPU, holders=()), (7,), 45, 5, ()),  # the driver shows nobody: ours has what is reserved for it
        (replace(GPU, holders=()), (), 0, 50, ()),
        (replace(GPU, holders=(Holder(7, 0),)), (7,), 45, 5, ()),
        (replace(GPU, used=0, holders=()), (7,), 45, 0, ()),  # ours has taken nothing yet
        (replace(GPU, used=20, holders=(Holder(8, 10),)), (7,), 45, 10, (8,)),
        (replace(GPU, used=200), (), 0, 80, (7, 8)),
    ],
)
def test_what_others_hold(
    gpu: Gpu, ours: tuple[int, ...], reserved: int, foreign: int, holders: tuple[int, ...]
) -> None:
    assert device(gpu, ours, reserved) == Device(uuid="GPU-1", model=H100, total=80, foreign=foreign, holders=holders)


# -- right before a launch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """This machine with other GPUs."""

    found: tuple[Gpu, ...]
    free: int = GIB

    def ram(self) -> Any:
        return SimpleNamespace(total=GIB, free=self.free)

    def gpus(self) -> tuple[Gpu, ...]:
        return self.found


@pytest.mark.parametrize(
    ("found", "reason", "detail"),
    [
        ((), Reason.GPU_COUNT, "tiny was placed on GPU-1, which is not there now"),
        (
            (Gpu("GPU-1", H100, 80 * GIB, 78 * GIB, (Holder(41, 77 * GIB), Holder(42, GIB))),),
            Reason.GPU_MEMORY,
            "tiny needs 3 GiB of GPU-1, 2 GiB of it is free: pid 41 holds most of the rest",
        ),
        (
            (Gpu("GPU-1", H100, 80 * GIB, 0), Gpu("GPU-2", H100, 80 * GIB, 80 * GIB)),
            Reason.GPU_MEMORY,
            "tiny needs 3 GiB of GPU-2, 0 B of it is free",
        ),
    ],
)
async def test_a_start_is_refused_by_what_is_free_now(
    tmp_path: Path, found: tuple[Gpu, ...], reason: Reason, detail: str
) -> None:
    async with Probe() as probe:
        node = FakeNode(tmp_path, probe, machine=Machine(found))  # type: ignore[arg-type]
        shares = tuple(DeviceShare(uuid=uuid, memory=3 * GIB) for uuid in ("GPU-1", "GPU-2")[: max(1, len(found))])
        request = node.request().model_copy(update={"devices": shares, "gpus": len(shares)})
        with pytest.raises(StepError) as caught:
            node.starter.check_memory(request)
    assert (caught.value.failure.reason, caught.value.failure.detail) == (reason, detail)


async def test_a_start_gets_the_gpus_as_they_are(tmp_path: Path) -> None:
    found = (Gpu("GPU-1", H100, 80 * GIB, 70 * GIB), Gpu("GPU-2", H100, 80 * GIB, 0))
    async with Probe() as probe:
        node = FakeNode(tmp_path, probe, machine=Machine(found))  # type: ignore[arg-type]
        shares = tuple(DeviceShare(uuid=uuid, memory=3 * GIB) for uuid in ("GPU-2", "GPU-1"))
        request = node.request().model_copy(update={"devices": shares, "gpus": 2})
        assert node.starter.check_memory(request) == (found[1], found[0])

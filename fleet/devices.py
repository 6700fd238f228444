"""Which devices of a node one shard can have together: its RAM, or GPUs that are whole. One place says so for all."""

from collections.abc import Iterable

from fleet.state import CPU, Device

SLICE = "MIG-"
"""Begins the uuid of a part of a GPU: CUDA shows a process one of them only, so they are never taken together."""


def suiting(devices: Iterable[Device], gpus: int, model: str = "") -> tuple[Device, ...]:
    """Those that a shard with so many GPUs (0: in RAM) could be given; `model`: GPUs with that in their name only."""
    if gpus == 0:
        return tuple([device for device in devices if device.uuid == CPU])
    named = model.casefold()
    return tuple(
        [
            device
            for device in devices
            if device.uuid != CPU
            and (not named or named in device.model.casefold())
            and (gpus == 1 or not device.uuid.startswith(SLICE))
        ]
    )


def most_gpus(devices: Iterable[Device]) -> int:
    """GPUs that one shard can have at most: the whole ones, or one slice."""
    known = tuple(devices)
    return max(len(suiting(known, 2)), min(1, len(suiting(known, 1))))

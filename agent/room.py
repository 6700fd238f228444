"""Which models a node's disk lets go: under a quota, those used longest ago, never one that runs or starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.reasons import Reason, StepError
from fleet.render import size


@dataclass(frozen=True)
class Kept:
    """A model's directory on the node."""

    name: str
    size: int
    """Bytes on the disk, or to come."""
    used_at: float
    """Seconds since the epoch; 0: never."""
    loose: bool
    """Whether it may go: nothing runs or starts from it."""


def surplus(kept: Sequence[Kept], need: int, quota: int, free: int, subject: str) -> list[Kept]:
    """What has to go so that `need` more bytes keep within the quota and the disk's `free` bytes.

    Raises StepError(DISK) where that is not enough; then nothing goes.
    """
    short = max(sum(one.size for one in kept) + need - quota, need - free)
    going: list[Kept] = []
    for one in sorted((one for one in kept if one.loose), key=lambda one: (one.used_at, one.name)):
        if short <= 0:
            break
        going.append(one)
        short -= one.size
    if short > 0:
        held = size(sum(one.size for one in kept if not one.loose))
        raise StepError(
            Reason.DISK,
            f"{subject} needs {size(need)}: of the quota of {size(quota)}, {held} is in use, and {size(max(0, free))} "
            "of the disk is free",
        )
    return going

"""What a safetensors file says about itself: how long it must be, from its header, read without trust."""

import json
import struct
from collections.abc import Callable

from fleet.reasons import Reason, StepError

MAX_HEADER = 100_000_000
"""Bytes: the limit that the format's own reader sets."""


def safetensors_extent(name: str, size: int, read: Callable[[int, int], bytes]) -> int:
    """The bytes the file `name` of `size` bytes must have; `read(offset, length)` gives fewer at its end.

    Raises StepError(WEIGHTS_UNREADABLE): not safetensors, or truncated.
    """
    start = read(0, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= MAX_HEADER:
        raise _unreadable(name, f"is not a safetensors file: it starts with {start!r}")
    if 8 + length > size:
        raise _unreadable(name, f"is truncated: its header alone is {length:,} bytes, it has {size:,}")
    try:
        header = json.loads(read(8, length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        end = max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _unreadable(name, "is not a safetensors file: its header is damaged") from error
    if not all(isinstance(each, int) and 0 <= each < 2**62 for each in ends):
        raise _unreadable(name, "is not a safetensors file: its header names impossible offsets")
    if 8 + length + end > size:
        raise _unreadable(name, f"is truncated: its header says {8 + length + end:,} bytes, it has {size:,}")
    return int(8 + length + end)


def _unreadable(name: str, wrong: str) -> StepError:
    return StepError(Reason.WEIGHTS_UNREADABLE, f"{name} {wrong}")

"""What safetensors files say about themselves: how long one must be, which shards there are; read without trust."""

import json
import struct
from collections.abc import Callable, Collection

from fleet.reasons import Reason, StepError
from fleet.repos import INDEX

MAX_HEADER = 100_000_000
"""Bytes: the limit that the format's own reader sets."""
MAX_INDEX = 64 * 1024**2
"""Bytes of a shard index: that of a model with a thousand shards takes 10 MB."""


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


def check_index(text: bytes, present: Collection[str]) -> None:
    """Every shard that the index names must be there: hashes prove the files that came, not that all came.

    Raises StepError: WEIGHTS_UNREADABLE (no index, or one of more than MAX_INDEX bytes), WEIGHTS_MISSING.
    """
    try:
        if len(text) > MAX_INDEX:
            raise ValueError("too large")
        named = {str(value) for value in json.loads(text)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{INDEX} is not a shard index") from error
    absent = sorted(named - set(present))
    if absent:
        raise StepError(Reason.WEIGHTS_MISSING, f"{INDEX} names {absent[0][:200]!r}, which the repo does not have")


def _unreadable(name: str, wrong: str) -> StepError:
    return StepError(Reason.WEIGHTS_UNREADABLE, f"{name} {wrong}")

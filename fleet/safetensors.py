"""What safetensors files say about themselves: tensors, length, shards; read without trust."""

import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet.reasons import Reason, StepError
from fleet.repos import INDEX
from fleet.shape import MAX_LAYERS, Spread

MAX_HEADER = 100_000_000
"""Bytes: the limit that the format's own reader sets."""
MAX_INDEX = 64 * 1024**2
"""Bytes of a shard index: that of a model with a thousand shards takes 10 MB."""
MAX_TENSORS = 500_000
"""In one file: the largest mixtures of experts have some 90,000 in all their files together."""
MAX_DIMS = 16

BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Of one number of each type the format knows."""

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
HEADS = ("lm_head.weight",)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str
    elements: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Header:
    """What one file holds."""

    tensors: tuple[Tensor, ...]
    extent: int
    """Bytes the file must have."""


def read_safetensors(name: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """Read the header of the file `name` of `size` bytes; `read(offset, length)` gives fewer at its end.

    Raises StepError(WEIGHTS_UNREADABLE): not safetensors, truncated, or absurd.
    """
    start = read(0, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= MAX_HEADER:
        raise _unreadable(name, f"is not a safetensors file: it starts with {start!r}")
    if 8 + length > size:
        raise _unreadable(name, f"is truncated: its header alone is {length:,} bytes, it has {size:,}")
    try:
        header = json.loads(read(8, length))
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, "is not a safetensors file: its header is damaged") from error
    if not isinstance(header, dict):
        raise _unreadable(name, "is not a safetensors file: its header is damaged")
    if len(header) > MAX_TENSORS:
        raise _unreadable(name, f"says it has {len(header):,} tensors, more than {MAX_TENSORS:,}: it is damaged")
    tensors = tuple(_tensor(name, key, entry) for key, entry in header.items() if key != "__metadata__")
    end = max((each[1] for each in tensors), default=0)
    if 8 + length + end > size:
        raise _unreadable(name, f"is truncated: its header says {8 + length + end:,} bytes, it has {size:,}")
    return Header(tuple(each[0] for each in tensors), 8 + length + end)


def held_bytes(tensors: Iterable[Tensor], config: Mapping[str, object], args: tuple[str, ...] = ()) -> int:
    """Bytes an engine holds of a model's tensors on all its devices together.

    vLLM and SGLang keep what is quantized as it is stored, and turn other floating-point weights into the type they
    compute in, of two bytes unless f32 is asked for. They load neither a second copy of tied embeddings nor layers
    behind the last one, which only predict further tokens.
    """
    return sum(size for _, size in _held(tensors, config, args))


def spread_of(tensors: Iterable[Tensor], config: Mapping[str, object], args: tuple[str, ...] = ()) -> Spread | None:
    """Which of these bytes are whose; None where the names do not tell the layer of each."""
    count = _text(config).get("num_hidden_layers")
    if not isinstance(count, int) or not 0 < count <= MAX_LAYERS:
        return None
    layers = [0] * count
    embedding = head = rest = 0
    for tensor, size in _held(tensors, config, args):
        layer = _LAYER.search(tensor.name) if _of_language(tensor.name) else None
        if layer is not None:
            layers[int(layer[1])] += size
        elif tensor.name.endswith(EMBEDDINGS):
            embedding += size
        elif tensor.name.endswith(HEADS):
            head += size
        else:
            rest += size
    # A model without a head of its own uses its embedding for it.
    return Spread(tuple(layers), embedding, head or embedding, rest) if all(layers) else None


def _held(
    tensors: Iterable[Tensor], config: Mapping[str, object], args: tuple[str, ...]
) -> Iterator[tuple[Tensor, int]]:
    """Each tensor that is loaded, with its bytes."""
    inner = _text(config)
    quantized = isinstance(config.get("quantization_config"), Mapping) or isinstance(
        inner.get("quantization_config"), Mapping
    )
    tied, layers = _tied(config), inner.get("num_hidden_layers")
    wide = 4 if any(arg in ("float32", "float", "--dtype=float32", "--dtype=float") for arg in args) else 2
    for tensor in tensors:
        if tied and tensor.name.endswith(HEADS):
            continue
        layer = _LAYER.search(tensor.name) if _of_language(tensor.name) else None
        if layer is not None and isinstance(layers, int) and 0 < layers <= int(layer[1]):
            continue
        floating = tensor.dtype in ("F32", "F16", "BF16", "F64")
        yield tensor, tensor.elements * wide if floating and not quantized else tensor.size


def _text(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language part of the config."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _tied(config: Mapping[str, object]) -> bool:
    return config.get("tie_word_embeddings", _text(config).get("tie_word_embeddings")) is True


def _of_language(name: str) -> bool:
    return "vision" not in name


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


def _tensor(file: str, name: str, entry: object) -> tuple[Tensor, int]:
    """A tensor, and where its bytes end."""
    if not isinstance(entry, dict):
        raise _unreadable(file, "is not a safetensors file: its header is damaged")
    offsets, shape, dtype = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
    if not isinstance(offsets, list) or len(offsets) != 2 or not isinstance(dtype, str):
        raise _unreadable(file, "is not a safetensors file: its header is damaged")
    if not all(_count(each) for each in offsets) or offsets[0] > offsets[1]:
        raise _unreadable(file, "is not a safetensors file: its header names impossible offsets")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_count(each) for each in shape):
        raise _unreadable(file, f"has the tensor {name[:80]!r} of an impossible shape: it is damaged")
    elements = 1
    for dim in shape:
        elements *= dim
        if elements >= 2**62:
            raise _unreadable(file, f"has the tensor {name[:80]!r} of an impossible shape: it is damaged")
    stored = offsets[1] - offsets[0]
    if dtype in BITS and -(-elements * BITS[dtype] // 8) != stored:
        raise _unreadable(
            file, f"has the tensor {name[:80]!r} of {elements:,} {dtype} in {stored:,} bytes: it is damaged"
        )
    return Tensor(name, dtype, elements, stored), offsets[1]


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _unreadable(name: str, wrong: str) -> StepError:
    return StepError(Reason.WEIGHTS_UNREADABLE, f"{name} {wrong}")

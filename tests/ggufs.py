"""Small GGUF files for tests, written byte by byte; nothing in them can serve."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Strings:
    """An array of `count` strings, such as a vocabulary."""

    count: int


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 8192,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": Strings(100),
}


def gguf(
    metadata: Mapping[str, object] = LLAMA,
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = (("w", (64, 4), 0, 1024),),
    *,
    version: int = 3,
    alignment: int = 32,
    missing: int = 0,
) -> bytes:
    """A file; tensors are name, dims, type and bytes. `missing` bytes are left off its end."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [text(key) + value(item) for key, item in metadata.items()]
    offset = 0
    for name, dims, kind, size in tensors:
        head.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        offset += -(-size // alignment) * alignment
    body = b"".join(head)
    if tensors:
        body += bytes(-len(body) % alignment)
        body += bytes(offset - (-tensors[-1][3] % alignment))
    return body[: len(body) - missing]


def text(string: str) -> bytes:
    """A length and its bytes."""
    raw = string.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """A type and its value."""
    match item:
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item) if item >= 0 else struct.pack("<Ii", 5, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + text(item)
        case Strings():
            return struct.pack("<IIQ", 9, 8, item.count) + b"".join(text(f"t{number}") for number in range(item.count))
        case tuple():
            return struct.pack(f"<IIQ{len(item)}I", 9, 4, len(item), *item)
    raise TypeError(f"no GGUF type for {item!r}")

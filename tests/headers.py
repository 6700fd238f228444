"""Headers of models for tests, as bytes and as values."""

import json
import struct

from fleet.gguf import Gguf, read_gguf
from tests.ggufs import gguf

QWEN: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}

TENSOR: dict[str, object] = {
    "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "__metadata__": {"format": "pt"},
}


def header(metadata: dict[str, object]) -> Gguf:
    """A GGUF's header with this metadata."""
    data = gguf(metadata)
    return read_gguf("m.gguf", len(data), lambda at, length: data[at : at + length])


def safetensors(entries: object, body: int) -> bytes:
    """A file with this header and so many bytes behind it."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)

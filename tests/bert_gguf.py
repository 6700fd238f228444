"""A small BERT as GGUF, with random weights: llama.cpp embeds with it, or ranks, as it would with a trained one.

Its vocabulary has a token for each printable character, at the beginning of a word and within one.
"""

import random
import string
import struct
from pathlib import Path

from tests.gguf_models import CONTROL, F32, NORMAL, Kinds, Tensors, Words, write

LAYERS, EMBEDDING, HEADS, FORWARD, CONTEXT, TYPES = 2, 64, 2, 128, 512, 2
FIRST = 104
"""Of the tokens that stand for text: llama.cpp looks for BERT's own special ones before it."""
SPECIAL = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
ALIGNMENT = 32


def make(path: Path, *, ranks: bool = False) -> Path:
    """Write it; returns the path. `ranks`: with a head that gives one score."""
    tokens = [SPECIAL.get(number, f"[unused{number}]") for number in range(FIRST)]
    letters = [char for char in string.printable if char.isprintable() and not char.isspace()]
    tokens += [f"\u2581{letter}" for letter in letters] + letters
    kinds = (CONTROL,) * FIRST + (NORMAL,) * (len(tokens) - FIRST)
    metadata = {
        "general.architecture": "bert",
        "bert.block_count": LAYERS,
        "bert.context_length": CONTEXT,
        "bert.embedding_length": EMBEDDING,
        "bert.feed_forward_length": FORWARD,
        "bert.attention.head_count": HEADS,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.attention.causal": False,
        "bert.pooling_type": 1,  # the mean of all tokens
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": Words(tuple(tokens)),
        "tokenizer.ggml.token_type": Kinds(kinds),
        "tokenizer.ggml.token_type_count": TYPES,
    }
    tensors: Tensors = {
        "token_embd.weight": ((EMBEDDING, len(tokens)), F32),
        "token_types.weight": ((EMBEDDING, TYPES), F32),
        "position_embd.weight": ((EMBEDDING, CONTEXT), F32),
        **_pair("token_embd_norm", EMBEDDING),
    }
    for block in range(LAYERS):
        tensors |= {f"blk.{block}.{name}": tensor for name, tensor in _block().items()}
    if ranks:
        tensors |= {**_pair("cls", EMBEDDING, EMBEDDING), **_pair("cls.output", 1, EMBEDDING)}
    write(path, metadata, tensors)
    _fill(path, tensors)
    return path


def _block() -> Tensors:
    return {
        **_pair("attn_q", EMBEDDING, EMBEDDING),
        **_pair("attn_k", EMBEDDING, EMBEDDING),
        **_pair("attn_v", EMBEDDING, EMBEDDING),
        **_pair("attn_output", EMBEDDING, EMBEDDING),
        **_pair("attn_output_norm", EMBEDDING),
        **_pair("ffn_up", FORWARD, EMBEDDING),
        **_pair("ffn_down", EMBEDDING, FORWARD),
        **_pair("layer_output_norm", EMBEDDING),
    }


def _pair(name: str, out: int, into: int = 0) -> Tensors:
    """A layer's weight and bias; without `into`, a norm's."""
    return {f"{name}.weight": ((into, out) if into else (out,), F32), f"{name}.bias": ((out,), F32)}


def _fill(path: Path, tensors: Tensors) -> None:
    """Put numbers where `write` left a hole: the same ones each time."""
    chance = random.Random(7)  # noqa: S311 - weights, not secrets
    body = bytearray()
    for dims, _ in tensors.values():
        count = dims[0] * (dims[1] if len(dims) > 1 else 1)
        numbers = struct.pack(f"<{count}f", *(chance.gauss(0.0, 0.3) for _ in range(count)))
        body += numbers + bytes(-len(numbers) % ALIGNMENT)
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size - len(body))
        stream.write(body)

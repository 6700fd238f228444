"""GGUF models of several architectures that llama.cpp really loads, hundreds of megabytes of zeros, written in a blink.

The files are sparse: the header is written, the tensors are a hole. Their answers are nonsense; what the engine keeps
in memory for them is what a trained model of that shape takes.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.gguf import BLOCKS
from tests.ggufs import text, value

F32, F16, Q8_0 = 0, 1, 8
VOCABULARY = 4096
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

Tensors = dict[str, tuple[tuple[int, ...], int]]
"""Name → dims, the fastest first, and type."""


@dataclass(frozen=True)
class Words:
    """An array of strings."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Floats:
    """An array of `count` zeros."""

    count: int


@dataclass(frozen=True)
class Kinds:
    """An array of signed numbers."""

    kinds: tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """The numbers a transformer is made of."""

    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head: int
    forward: int
    vocabulary: int = VOCABULARY
    kind: int = F16
    """The type of its large tensors."""
    context: int = 65_536


@dataclass(frozen=True)
class Model:
    """One model: its architecture, and what its header and tensors are."""

    architecture: str
    size: Size
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Beneath the architecture's prefix."""
    layer: Callable[[Size], Tensors] = lambda size: {}
    """Tensors of each block; names without the block."""
    outer: Callable[[Size], Tensors] = lambda size: {}
    """Further tensors of the whole."""

    def write(self, path: Path) -> Path:
        """Write it; returns the path."""
        size = self.size
        own = {
            "block_count": size.layers,
            "context_length": size.context,
            "embedding_length": size.embedding,
            "feed_forward_length": size.forward,
            "attention.head_count": size.heads,
            "attention.head_count_kv": size.kv_heads,
            "attention.key_length": size.head,
            "attention.value_length": size.head,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": size.head,
            "vocab_size": size.vocabulary,
            **self.metadata,
        }
        metadata = {
            "general.architecture": self.architecture,
            **{f"{self.architecture}.{key}": item for key, item in own.items() if item is not None},
            **tokenizer(size.vocabulary),
        }
        tensors: Tensors = {
            "token_embd.weight": ((size.embedding, size.vocabulary), size.kind),
            "output_norm.weight": ((size.embedding,), F32),
            **self.outer(size),
        }
        for block in range(size.layers):
            tensors |= {f"blk.{block}.{name}": tensor for name, tensor in self.layer(size).items()}
        write(path, metadata, tensors)
        return path


def write(path: Path, metadata: Mapping[str, object], tensors: Tensors) -> None:
    """A sparse file: the header, then a hole for the tensors."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [text(key) + _value(item) for key, item in metadata.items()]
    offset = 0
    for name, (dims, kind) in tensors.items():
        head.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
        block, width = BLOCKS[kind]
        elements = 1
        for dim in dims:
            elements *= dim
        offset += -(-(elements // block * width) // 32) * 32
    body = b"".join(head)
    start = -(-len(body) // 32) * 32
    with path.open("wb") as stream:
        stream.write(body)
        stream.truncate(start + offset)


def tokenizer(vocabulary: int) -> dict[str, object]:
    """A token for each byte, and words that stand for nothing."""
    special = ("<unk>", "<s>", "</s>")
    tokens = (*special, *(f"<0x{byte:02X}>" for byte in range(256)))
    tokens += tuple(f"\u2581w{number}" for number in range(vocabulary - len(tokens)))
    kinds: tuple[int, ...] = (UNKNOWN, CONTROL, CONTROL, *(BYTE,) * 256)
    kinds += (NORMAL,) * (vocabulary - len(kinds))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": Words(tokens),
        "tokenizer.ggml.scores": Floats(vocabulary),
        "tokenizer.ggml.token_type": Kinds(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _value(item: object) -> bytes:
    if isinstance(item, Words):
        return struct.pack("<IIQ", 9, 8, len(item.words)) + b"".join(text(word) for word in item.words)
    if isinstance(item, Floats):
        return struct.pack("<IIQ", 9, 6, item.count) + bytes(4 * item.count)
    if isinstance(item, Kinds):
        return struct.pack(f"<IIQ{len(item.kinds)}i", 9, 5, len(item.kinds), *item.kinds)
    return value(item)


# -- the blocks ------------------------------------------------------------------------------------------------------


def attention(size: Size) -> Tensors:
    """Queries, keys, values and the way out."""
    queries, keys = size.heads * size.head, size.kv_heads * size.head
    return {
        "attn_norm.weight": ((size.embedding,), F32),
        "attn_q.weight": ((size.embedding, queries), size.kind),
        "attn_k.weight": ((size.embedding, keys), size.kind),
        "attn_v.weight": ((size.embedding, keys), size.kind),
        "attn_output.weight": ((queries, size.embedding), size.kind),
    }


def feed_forward(size: Size) -> Tensors:
    """Gate, up and down."""
    return {
        "ffn_norm.weight": ((size.embedding,), F32),
        "ffn_gate.weight": ((size.embedding, size.forward), size.kind),
        "ffn_up.weight": ((size.embedding, size.forward), size.kind),
        "ffn_down.weight": ((size.forward, size.embedding), size.kind),
    }


def dense(size: Size) -> Tensors:
    """Llama's block."""
    return {**attention(size), **feed_forward(size)}


def _biased(size: Size) -> Tensors:
    keys = size.kv_heads * size.head
    biases = {"attn_q.bias": size.heads * size.head, "attn_k.bias": keys, "attn_v.bias": keys}
    return {**dense(size), **{name: ((length,), F32) for name, length in biases.items()}}


def _normed(size: Size) -> Tensors:
    return {"attn_q_norm.weight": ((size.head,), F32), "attn_k_norm.weight": ((size.head,), F32)}


def _gemma(size: Size) -> Tensors:
    after = {"post_attention_norm.weight": ((size.embedding,), F32), "post_ffw_norm.weight": ((size.embedding,), F32)}
    return {**dense(size), **after}


def _phi(size: Size) -> Tensors:
    whole = (size.heads + 2 * size.kv_heads) * size.head
    found = dense(size)
    for name in ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight"):
        del found[name]
    found["attn_qkv.weight"] = ((size.embedding, whole), size.kind)
    found["ffn_up.weight"] = ((size.embedding, 2 * size.forward), size.kind)
    return found


EXPERTS = 8


def _experts(size: Size) -> Tensors:
    return {
        **attention(size),
        **_normed(size),
        "ffn_norm.weight": ((size.embedding,), F32),
        "ffn_gate_inp.weight": ((size.embedding, EXPERTS), F32),
        "ffn_gate_exps.weight": ((size.embedding, size.forward, EXPERTS), size.kind),
        "ffn_up_exps.weight": ((size.embedding, size.forward, EXPERTS), size.kind),
        "ffn_down_exps.weight": ((size.forward, size.embedding, EXPERTS), size.kind),
    }


QUERY, LATENT, ROTATED, KEY, VALUE = 256, 512, 64, 128, 128


def _latent(size: Size) -> Tensors:
    return {
        **feed_forward(size),
        "attn_norm.weight": ((size.embedding,), F32),
        "attn_q_a.weight": ((size.embedding, QUERY), size.kind),
        "attn_q_a_norm.weight": ((QUERY,), F32),
        "attn_q_b.weight": ((QUERY, size.heads * (KEY + ROTATED)), size.kind),
        "attn_kv_a_mqa.weight": ((size.embedding, LATENT + ROTATED), size.kind),
        "attn_kv_a_norm.weight": ((LATENT,), F32),
        "attn_k_b.weight": ((KEY, LATENT, size.heads), size.kind),
        "attn_v_b.weight": ((LATENT, VALUE, size.heads), size.kind),
        "attn_output.weight": ((size.heads * VALUE, size.embedding), size.kind),
    }


STATE, CONV = 16, 4


def _recurrent(size: Size) -> Tensors:
    inner, rank = 2 * size.embedding, size.embedding // 16
    return {
        "attn_norm.weight": ((size.embedding,), F32),
        "ssm_in.weight": ((size.embedding, 2 * inner), size.kind),
        "ssm_conv1d.weight": ((CONV, inner), F32),
        "ssm_conv1d.bias": ((inner,), F32),
        "ssm_x.weight": ((inner, rank + 2 * STATE), size.kind),
        "ssm_dt.weight": ((rank, inner), size.kind),
        "ssm_dt.bias": ((inner,), F32),
        "ssm_a": ((STATE, inner), F32),
        "ssm_d": ((inner,), F32),
        "ssm_out.weight": ((inner, size.embedding), size.kind),
    }


def _untied(size: Size) -> Tensors:
    return {"output.weight": ((size.embedding, size.vocabulary), size.kind)}


MODELS: Mapping[str, Model] = {
    "llama": Model("llama", Size(8, 1024, 16, 8, 64, 2816), layer=dense, outer=_untied),
    "qwen2": Model("qwen2", Size(8, 1024, 16, 2, 64, 4096, kind=Q8_0, vocabulary=32_768), layer=_biased),
    "qwen3moe": Model(
        "qwen3moe",
        Size(6, 768, 16, 4, 128, 1024),
        {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 1024},
        _experts,
        _untied,
    ),
    "gemma2": Model(
        "gemma2",
        Size(8, 1024, 8, 4, 256, 4096),
        {"attention.sliding_window": 512, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _gemma,
    ),
    "gemma3": Model(
        "gemma3",
        Size(12, 1024, 8, 4, 256, 3072),
        {"attention.sliding_window": 512},
        lambda size: {**_gemma(size), **_normed(size)},
    ),
    "phi3": Model("phi3", Size(8, 1024, 16, 16, 64, 2816), {"attention.sliding_window": 2047}, _phi, _untied),
    "deepseek2": Model(
        "deepseek2",
        Size(8, 1024, 16, 1, LATENT + ROTATED, 2816),
        {
            "leading_dense_block_count": 8,
            "attention.q_lora_rank": QUERY,
            "attention.kv_lora_rank": LATENT,
            "attention.value_length": LATENT,
            "attention.key_length_mla": KEY + ROTATED,
            "attention.value_length_mla": VALUE,
            "rope.dimension_count": ROTATED,
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": 512,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
        },
        _latent,
        _untied,
    ),
    "mamba": Model(
        "mamba",
        Size(16, 1024, 0, 0, 0, 0),
        {
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.dimension_count": None,
            "ssm.conv_kernel": CONV,
            "ssm.inner_size": 2048,
            "ssm.state_size": STATE,
            "ssm.time_step_rank": 64,
        },
        _recurrent,
    ),
}
"""By architecture, each with another way to remember: all heads, groups of them, windows, one latent vector, states."""

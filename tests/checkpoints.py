"""Checkpoints of several architectures as safetensors, hundreds of megabytes of zeros, written in a blink.

The tensors are a hole in a sparse file. vLLM loads them as any other; what it keeps in memory for them is what a
trained model of that shape takes.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from tests.tiny_checkpoint import BOS, EOS
from tests.tiny_checkpoint import make as make_tiny

Tensors = dict[str, tuple[int, ...]]

HIDDEN, HEADS, KV_HEADS, HEAD, FORWARD, LAYERS, CONTEXT, WORDS = 1024, 16, 8, 64, 2816, 12, 8192, 8192

COMMON: Mapping[str, object] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "vocab_size": WORDS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

EXPERTS, WIDTH = 8, 768

CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "query_pre_attn_scalar": HEAD,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""By `model_type`: heads in groups, windows, experts."""


def make(directory: Path, kind: str) -> Path:
    """Write one; returns the directory."""
    make_tiny(directory)  # for its tokenizer
    config = {**COMMON, **CONFIGS[kind]}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write(directory / "model.safetensors", _tensors(kind))
    return directory


def _write(path: Path, tensors: Tensors) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)


def _tensors(kind: str) -> Tensors:
    found: Tensors = {"model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not {**COMMON, **CONFIGS[kind]}["tie_word_embeddings"]:
        found["lm_head.weight"] = (WORDS, HIDDEN)
    for layer in range(LAYERS):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _block(kind).items()}
    return found


def _block(kind: str) -> Tensors:
    block: Tensors = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    if kind == "qwen3_moe":
        block |= {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,), "mlp.gate": (EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            block |= _forward(f"mlp.experts.{expert}", WIDTH)
        return block
    if kind == "gemma2":
        block |= {"pre_feedforward_layernorm": (HIDDEN,), "post_feedforward_layernorm": (HIDDEN,)}
    return {**block, **_forward("mlp", FORWARD)}


def _forward(prefix: str, width: int) -> Tensors:
    return {
        f"{prefix}.gate_proj": (width, HIDDEN),
        f"{prefix}.up_proj": (width, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, width),
    }

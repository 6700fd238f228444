"""A Llama of two layers and a quarter of a million parameters as safetensors, made from its own bytes in a blink.

Its tokenizer has one token for each byte. At temperature 0 its answers are nonsense, but always the same, printable,
and without end: the rows of its head for all other tokens are zero.
"""

import json
import random
import struct
from pathlib import Path

LAYERS, HIDDEN, HEADS, HEAD, MIDDLE, CONTEXT = 2, 128, 2, 64, 256, 2048
"""Heads of 64 are the smallest that vLLM takes on every CPU; two of them let two shards have one each."""
BOS, EOS = 256, 257
VOCABULARY = 258
ARCHITECTURE = "LlamaForCausalLM"
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def make(directory: Path) -> Path:
    """Write the checkpoint; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MIDDLE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    _write(directory / "tokenizer.json", _tokenizer())
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONTEXT,
        "chat_template": CHAT,
    }
    _write(directory / "tokenizer_config.json", tokenizer)
    (directory / "model.safetensors").write_bytes(_weights())
    return directory


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        for name in "qkv":
            shapes[f"{of}.self_attn.{name}_proj.weight"] = (HEADS * HEAD, HIDDEN)
        shapes[f"{of}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{of}.mlp.gate_proj.weight"] = (MIDDLE, HIDDEN)
        shapes[f"{of}.mlp.up_proj.weight"] = (MIDDLE, HIDDEN)
        shapes[f"{of}.mlp.down_proj.weight"] = (HIDDEN, MIDDLE)
        shapes[f"{of}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{of}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def _weights() -> bytes:
    chance = random.Random(7)  # noqa: S311 -- the same weights every time
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in _shapes().items():
        begin = len(data)
        for row in range(shape[0]):
            for _ in range(shape[1] if len(shape) > 1 else 1):
                silent = name.startswith("lm_head") and not 32 <= row < 127
                value = 0.0 if silent else 1.0 if len(shape) == 1 else chance.gauss(0.0, 0.05)
                data += struct.pack("<f", value)[2:]  # the upper half of a float is its bfloat16
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, len(data)]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + bytes(data)


def _tokenizer() -> dict[str, object]:
    vocabulary = {_letter(byte): byte for byte in range(256)} | {"<s>": BOS, "</s>": EOS}
    special = [
        {"id": number, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, number in (("<s>", BOS), ("</s>", EOS))
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _letter(byte: int) -> str:
    """The printable character that stands for a byte in such vocabularies: GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [one for one in range(256) if one not in plain].index(byte))

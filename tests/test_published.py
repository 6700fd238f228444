"""Well-known models by their published configs: parameters, bytes of a token, and the machines they are known to need.

Each file in `tests/data/configs/` names its source. Bytes of a token are for two bytes a number: those that the models'
papers or cards give (DeepSeek-V3: 70 KB; the Llama, Mistral and Qwen models: 2 x layers x KV heads x head x 2 bytes).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.estimate import Estimate, estimate, kv_bytes_per_token
from fleet.fit import smallest
from fleet.paper import Paper, fleet_of
from fleet.shape import ModelShape
from fleet.shape_config import shape_from_config
from fleet.spec import Engine

CONFIGS = Path(__file__).parent / "data" / "configs"
KNOWN = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(CONFIGS.glob("*.json"))}
GEMMA_WORDS = 262_208
"""Google's configs leave it to the class."""
STORED = {"deepseek-v3": 1.0, "gpt-oss-20b": 13_761_264_768 / 20_914_757_184}
"""Bytes of a parameter where it is not two: FP8 as published, and the size of gpt-oss's MXFP4 checkpoint."""


def shape_of(name: str) -> ModelShape:
    known = KNOWN[name]
    return shape_from_config(known["config"], int(known["parameters"] * STORED.get(name, 2.0)))


@pytest.mark.parametrize("name", KNOWN)
def test_the_config_tells_all(name: str) -> None:
    assert shape_of(name).missing == ()
    assert KNOWN[name]["source"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_token_takes_what_is_published(name: str) -> None:
    assert kv_bytes_per_token(shape_of(name), Engine.VLLM) == KNOWN[name]["kv_bytes_per_token"]


@pytest.mark.parametrize("name", KNOWN)
def test_the_published_parameters_are_those_of_the_config(name: str) -> None:
    """The shape's own numbers, put together as the architecture does, make up the published count."""
    assert _parameters(KNOWN[name]["config"], shape_of(name)) == KNOWN[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "full"),
    [("gemma-3-27b", 10), ("gpt-oss-20b", 12), ("mistral-7b-v0.1", 0), ("phi-3-mini-4k", 0), ("qwen2.5-72b", 80)],
)
def test_layers_that_keep_every_token(name: str, full: int) -> None:
    assert sum(not layer.window for layer in shape_of(name).layers) == full


def test_windows_save_most_of_a_long_context() -> None:
    """Gemma 3's report: of the memory of a global cache at 32k, the windows leave less than 15 % for local layers."""
    long = estimate(shape_of("gemma-3-27b"), Engine.LLAMACPP, context_length=32_768, concurrency=1, gpus=0)
    assert isinstance(long, Estimate)
    assert 0.15 < long.kv_cache / (KNOWN["gemma-3-27b"]["kv_bytes_per_token"] * 32_768) < 0.25


@pytest.mark.parametrize(
    ("name", "paper", "gpus", "nodes"),
    [
        ("smollm2-135m", {"gpus": "1x8GiB"}, 1, 1),
        ("llama-3.1-8b", {"gpus": "1x24GiB"}, 1, 1),
        ("mistral-7b-v0.1", {"gpus": "1x24GiB"}, 1, 1),
        ("qwen2.5-7b", {"gpus": "1x24GiB"}, 1, 1),
        ("qwen3-30b-a3b", {"gpus": "1x80GiB"}, 1, 1),
        ("gemma-3-27b", {"gpus": "1x80GiB"}, 1, 1),
        ("gpt-oss-20b", {"gpus": "1x24GiB"}, 1, 1),
        ("llama-3.1-70b", {"gpus": "8x80GiB"}, 2, 1),
        ("qwen2.5-72b", {"gpus": "8x80GiB"}, 2, 1),
        ("mixtral-8x7b", {"gpus": "8x80GiB"}, 2, 1),
        ("llama-3.1-405b", {"gpus": "8x80GiB", "nodes": 2}, 8, 2),
        ("deepseek-v3", {"gpus": "8x141GiB"}, 8, 1),
        ("deepseek-v3", {"gpus": "8x80GiB", "nodes": 2}, 8, 2),
    ],
)
def test_the_machines_they_are_known_to_need(name: str, paper: dict[str, Any], gpus: int, nodes: int) -> None:
    state = fleet_of(Paper.model_validate(paper))
    found = smallest(state, shape_of(name), Engine.VLLM, context_length=4096, concurrency=4, disk=0)
    assert found is not None
    assert (found.gpus, found.nodes) == (gpus, nodes)


def _parameters(config: dict[str, Any], shape: ModelShape) -> int:
    """Elements of all tensors of the language model, from its config."""
    text: dict[str, Any] = config.get("text_config", config)
    kind, hidden, heads = text["model_type"], shape.embedding, shape.heads
    tied = config.get("tie_word_embeddings", "text_config" in config)
    total = (shape.vocabulary or GEMMA_WORDS) * hidden * (1 if tied else 2) + hidden
    for index, layer in enumerate(shape.layers):
        norms = (4 if kind == "gemma3_text" else 2) * hidden
        total += _attention(text, shape, hidden, heads, layer.key_dim) + _forward(text, shape, index) + norms
    return total


def _attention(text: dict[str, Any], shape: ModelShape, hidden: int, heads: int, head: int) -> int:
    if "kv_lora_rank" in text:
        queries, latent, rotated = text["q_lora_rank"], text["kv_lora_rank"], text["qk_rope_head_dim"]
        keys, values = text["qk_nope_head_dim"], text["v_head_dim"]
        reading = hidden * queries + queries + queries * heads * (keys + rotated)
        keeping = hidden * (latent + rotated) + latent + latent * heads * (keys + values)
        return int(reading + keeping + heads * values * hidden)
    kv_heads = shape.layers[0].kv_heads
    total = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    if text["model_type"] in ("qwen2", "gpt_oss"):
        total += (heads + 2 * kv_heads) * head  # biases
    if text["model_type"] == "gpt_oss":
        total += hidden + heads  # the way out's bias, and the sinks
    if text["model_type"] in ("qwen3_moe", "gemma3_text"):
        total += 2 * head
    return total


def _forward(text: dict[str, Any], shape: ModelShape, index: int) -> int:
    hidden = shape.embedding
    experts = next((text[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in text), 0)
    if not experts or index < text.get("first_k_dense_replace", 0):
        return 3 * hidden * shape.feed_forward
    width = text.get("moe_intermediate_size", shape.feed_forward)
    total = (experts + text.get("n_shared_experts", 0)) * 3 * hidden * width + experts * hidden
    if text["model_type"] == "gpt_oss":
        total += experts * (2 * width + hidden) + experts
    return int(total + (experts if text["model_type"] == "deepseek_v3" else 0))

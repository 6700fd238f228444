"""Shapes, estimates and judgements, as tables; the estimate against what was measured on the real engine."""

import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.architectures import ARCHITECTURES, FORMATS, engine_for
from fleet.facts import node_joined, node_lost
from fleet.fit import (
    DEFAULT_CONTEXT,
    Estimate,
    FitVerdict,
    ModelShape,
    default_context,
    estimate,
    judge,
    shape_from_config,
    shape_from_gguf,
)
from fleet.gguf import Gguf, read_gguf
from fleet.reasons import Reason, StepError
from fleet.safetensors import safetensors_extent
from fleet.spec import Engine, Format, ShardNeed
from fleet.state import EngineOffer, FleetState, NodeState
from fleet.wishes import cordon
from tests.fleets import inventory
from tests.ggufs import LLAMA, Strings, gguf

MIB = 1024**2
GIB = 1024**3

SMOLLM2 = ModelShape(
    architecture="llama",
    weights_bytes=98_362_432,
    layers=30,
    kv_heads=(3,) * 30,
    key_dim=64,
    value_dim=64,
    embedding=576,
    feed_forward=1536,
    vocabulary=49_152,
    context_length=8192,
)

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def header(metadata: dict[str, object]) -> Gguf:
    data = gguf(metadata)
    return read_gguf("m.gguf", len(data), lambda at, length: data[at : at + length])


def total(
    shape: ModelShape, engine: Engine = Engine.LLAMACPP, context: int = 2048, slots: int = 4, gpus: int = 0
) -> int:
    found = estimate(shape, engine, context_length=context, concurrency=slots, gpus=gpus)
    assert isinstance(found, Estimate)
    return found.total


@pytest.mark.parametrize(
    ("context", "slots", "measured"),
    [(2048, 1, 210), (512, 4, 214), (8192, 1, 345), (2048, 4, 348), (8192, 4, 889), (2048, 16, 903)],
)
def test_estimate_is_never_below_what_was_measured_and_within_a_tenth(context: int, slots: int, measured: int) -> None:
    assert measured * MIB <= total(SMOLLM2, context=context, slots=slots) <= 1.1 * measured * MIB


def test_kv_cache_is_two_layers_heads_dim_bytes() -> None:
    found = estimate(SMOLLM2, Engine.LLAMACPP, context_length=2048, concurrency=4, gpus=0)
    assert isinstance(found, Estimate)
    assert found.kv_cache == 2 * 30 * 3 * 64 * 2 * 2048 * 4 == 180 * MIB


def test_real_model_has_the_measured_shape() -> None:
    model = os.environ.get("LLMGW_TEST_MODEL")
    if not model:
        pytest.skip("LLMGW_TEST_MODEL does not name a GGUF file")
    path = Path(model)
    data = path.read_bytes()[: 8 * MIB]
    found = read_gguf(path.name, path.stat().st_size, lambda at, length: data[at : at + length])
    assert shape_from_gguf(found, path.stat().st_size) == SMOLLM2


def test_shape_of_a_gguf() -> None:
    shape = shape_from_gguf(header(LLAMA), 1000)
    assert shape == ModelShape("llama", 1000, 2, (2, 2), 16, 16, 64, 128, 100, 8192)


@pytest.mark.parametrize(
    ("change", "attribute", "expected"),
    [
        ({"llama.attention.head_count_kv": (4, 0)}, "kv_heads", (4, 0)),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 24}, "key_dim", 32),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 24}, "value_dim", 24),
        ({"llama.attention.key_length": 576, "llama.attention.key_length_mla": 192}, "value_dim", 0),
        ({"llama.feed_forward_length": (64, 256)}, "feed_forward", 256),
        ({"tokenizer.ggml.tokens": Strings(7)}, "vocabulary", 7),
    ],
)
def test_shape_reads(change: dict[str, object], attribute: str, expected: object) -> None:
    shape = shape_from_gguf(header({**LLAMA, **change}), 1)
    assert getattr(shape, attribute) == expected
    assert shape.missing == ()


def test_heads_stand_in_for_kv_heads() -> None:
    metadata = {key: value for key, value in LLAMA.items() if not key.endswith("head_count_kv")}
    assert shape_from_gguf(header(metadata), 1).kv_heads == (4, 4)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"llama.block_count": 0}, "number of layers"),
        ({"llama.block_count": 2**31}, "number of layers"),
        ({"llama.attention.head_count_kv": (1, 2, 3), "llama.attention.head_count": (1, 2, 3)}, "number of KV heads"),
        ({"llama.attention.head_count": 0, "llama.attention.head_count_kv": 0}, "number of KV heads"),
        ({"llama.embedding_length": "wide"}, "embedding length"),
        ({"tokenizer.ggml.tokens": Strings(0)}, "vocabulary"),
        ({"llama.ssm.state_size": 16}, "size of its recurrent state"),
        ({"general.architecture": 7}, "architecture"),
    ],
)
def test_what_the_header_leaves_out_is_named_and_never_guessed(change: dict[str, object], missing: str) -> None:
    shape = shape_from_gguf(header({**LLAMA, **change}), 1)
    assert missing in shape.missing
    assert estimate(shape, Engine.LLAMACPP, context_length=1, concurrency=1, gpus=0) == shape.missing


def test_shape_of_a_config() -> None:
    shape = shape_from_config(QWEN, 988_097_824)
    assert shape == ModelShape("Qwen2ForCausalLM", 988_097_824, 24, (2,) * 24, 64, 64, 896, 4864, 151936, 32768)
    assert shape_from_config({"architectures": ["X"], "text_config": QWEN}, 1).layers == 24


def test_latent_attention_keeps_one_vector() -> None:
    latent = shape_from_config({**QWEN, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}, 1)
    assert (latent.kv_heads[0], latent.key_dim, latent.value_dim, latent.missing) == (1, 512, 64, ())


@given(
    st.dictionaries(
        st.sampled_from([*QWEN, "head_dim", "text_config", "kv_lora_rank"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.integers(), max_size=2),
    )
)
def test_any_config_gives_a_shape(config: dict[str, object]) -> None:
    shape = shape_from_config(config, 1)
    found = estimate(shape, Engine.VLLM, context_length=10, concurrency=1, gpus=0)
    assert found == shape.missing if shape.missing else isinstance(found, Estimate)


@given(st.integers(1, 100_000), st.integers(1, 64), st.integers(0, 8), st.sampled_from(list(Engine)))
def test_estimate_grows_with_what_is_asked(context: int, slots: int, gpus: int, engine: Engine) -> None:
    base = total(SMOLLM2, engine, context, slots, gpus)
    assert base >= SMOLLM2.weights_bytes // max(1, gpus)
    assert total(SMOLLM2, engine, context + 1, slots, gpus) >= base
    assert total(SMOLLM2, engine, context, slots + 1, gpus) >= base


def test_vllm_on_a_cpu_covers_what_was_measured() -> None:
    """ENGINES.md: 2.6 GB at the peak with 1 GiB of KV cache and 0.27 GB of weights."""
    shape = shape_from_config(QWEN, 270_000_000)
    tokens = GIB // (24 * 2 * 64 * 2 * 2)
    assert 2_600_000_000 <= total(shape, Engine.VLLM, tokens, 1) <= 3_000_000_000


def test_default_context_is_capped() -> None:
    assert default_context(SMOLLM2) == DEFAULT_CONTEXT
    assert default_context(shape_from_gguf(header({**LLAMA, "llama.context_length": 512}), 1)) == 512
    assert default_context(ModelShape("x", 1)) == DEFAULT_CONTEXT


def test_every_engine_has_a_format_and_architectures() -> None:
    assert set(FORMATS) == set(ARCHITECTURES) == set(Engine)
    assert all(FORMATS[engine_for(each)] is each for each in Format)
    assert {"llama", "qwen2", "gemma3", "gpt-oss"} <= ARCHITECTURES[Engine.LLAMACPP]
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM"} <= ARCHITECTURES[Engine.VLLM] & ARCHITECTURES[Engine.SGLANG]


# -- the fleet --------------------------------------------------------------------------------------------------------

OFFER = (EngineOffer(engine=Engine.LLAMACPP, version="1", installed=True),)


def fleet(**nodes: dict[str, object]) -> FleetState:
    state = FleetState()
    for name, fields in nodes.items():
        state = node_joined(state, name, "i", inventory(**{"engines": OFFER, **fields}), 0.0)  # type: ignore[arg-type]
    return state


@pytest.mark.parametrize(
    ("nodes", "need", "verdict", "sentence", "candidate"),
    [
        ({}, ShardNeed(memory=400 * MIB), FitVerdict.UNKNOWN, "no node has joined yet; big needs 400 MiB", ""),
        (
            {"n1": {"engines": ()}},
            ShardNeed(memory=GIB),
            FitVerdict.UNKNOWN,
            "no node offers llamacpp yet; big needs 1 GiB",
            "",
        ),
        ({"n1": {}}, ShardNeed(memory=GIB), FitVerdict.FITS, "big needs 1 GiB; fits n1", "n1"),
        (
            {"n1": {"memory": 8 * GIB}, "n2": {"memory": 64 * GIB}, "n3": {"memory": GIB}},
            ShardNeed(memory=2 * GIB),
            FitVerdict.FITS,
            "big needs 2 GiB; fits 2 of 3 nodes",
            "n2",
        ),
        (
            {"n1": {"memory": 24 * GIB}, "n2": {"memory": 8 * GIB}},
            ShardNeed(memory=300 * GIB),
            FitVerdict.DOES_NOT_FIT,
            "big needs 300 GiB for one shard, the largest node n1 has 24 GiB",
            "",
        ),
        (
            {"n1": {"gpus": (80 * GIB,)}, "n2": {"gpus": ()}},
            ShardNeed(memory=40 * GIB, gpus=2),
            FitVerdict.DOES_NOT_FIT,
            "big needs 2 GPUs with 40 GiB each for one shard, the node with most GPUs, n1, has 1",
            "",
        ),
        (
            {"n1": {"gpus": (80 * GIB, 24 * GIB)}},
            ShardNeed(memory=40 * GIB, gpus=2),
            FitVerdict.DOES_NOT_FIT,
            "big needs 2 GPUs with 40 GiB each for one shard, the largest node n1 has 24 GiB",
            "",
        ),
        (
            {"n1": {"gpus": (80 * GIB, 80 * GIB)}},
            ShardNeed(memory=40 * GIB, gpus=2),
            FitVerdict.FITS,
            "big needs 2 GPUs with 40 GiB each; fits n1",
            "n1",
        ),
        (
            {"n1": {"disk": 10 * GIB}},
            ShardNeed(memory=GIB, disk=50 * GIB),
            FitVerdict.DOES_NOT_FIT,
            "big needs 1 GiB for one shard, and 50 GiB of disk for its weights, the node n1 has 10 GiB",
            "",
        ),
    ],
)
def test_judgement(
    nodes: dict[str, dict[str, object]], need: ShardNeed, verdict: FitVerdict, sentence: str, candidate: str
) -> None:
    found = judge(fleet(**nodes), "big", Engine.LLAMACPP, need)
    assert (found.verdict, found.sentence, found.candidate) == (verdict, sentence, candidate)


def test_cordoned_node_counts_as_capacity_but_is_no_candidate() -> None:
    state = cordon(fleet(n1={}), "n1", True, 1.0)
    found = judge(state, "big", Engine.LLAMACPP, ShardNeed(memory=GIB))
    assert (found.verdict, found.candidate) == (FitVerdict.FITS, "")


def test_lost_node_does_not_count() -> None:
    state = node_lost(fleet(n1={}), "n1", "i", "gone", 1.0)
    assert state.nodes["n1"].state is NodeState.LOST
    assert judge(state, "big", Engine.LLAMACPP, ShardNeed(memory=GIB)).verdict is FitVerdict.UNKNOWN


# -- safetensors ------------------------------------------------------------------------------------------------------


def safetensors(entries: object, body: int) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


TENSOR = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"format": "pt"}}


def test_safetensors_extent() -> None:
    data = safetensors(TENSOR, 16)
    assert safetensors_extent("m", len(data), lambda at, length: data[at : at + length]) == len(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not a safetensors file: it starts with b''"),
        (b"GGUF" + bytes(60), "is not a safetensors file"),
        (safetensors(TENSOR, 15), "is truncated: its header says"),
        (struct.pack("<Q", 5000) + b"{", "is truncated: its header alone is 5,000 bytes, it has 9"),
        (safetensors(b"[1]", 0), "header is damaged"),
        (safetensors(b"not json", 0), "header is damaged"),
        (safetensors({"w": {"data_offsets": [0]}}, 0), "header is damaged"),
        (safetensors({"w": {"data_offsets": [0, -1]}}, 0), "impossible offsets"),
        (safetensors({"w": {"data_offsets": [0, 1.5]}}, 9), "impossible offsets"),
    ],
)
def test_broken_safetensors_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(StepError) as caught:
        safetensors_extent("m.safetensors", len(data), lambda at, length: data[at : at + length])
    assert caught.value.failure.reason is Reason.WEIGHTS_UNREADABLE
    assert says in caught.value.failure.detail

"""Estimates as tables: against what was measured, against what engines say of their caches, and as they grow."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.architectures import ARCHITECTURES, FORMATS, engine_for
from fleet.estimate import (
    DEFAULT_CONTEXT,
    Estimate,
    default_context,
    estimate,
    kv_bytes_per_token,
)
from fleet.gguf import read_gguf
from fleet.shape import Layer, ModelShape
from fleet.shape_gguf import shape_from_gguf
from fleet.spec import Engine, Format
from tests.ggufs import LLAMA
from tests.headers import header

MIB = 1024**2
GIB = 1024**3

SMOLLM2 = ModelShape(
    architecture="llama",
    weights_bytes=96_576_768,
    layers=(Layer(kv_heads=3, key_dim=64, value_dim=64),) * 30,
    heads=9,
    embedding=576,
    feed_forward=1536,
    vocabulary=49_152,
    context_length=8192,
)


def parts(
    shape: ModelShape,
    engine: Engine = Engine.LLAMACPP,
    context: int = 2048,
    slots: int = 4,
    gpus: int = 0,
    args: tuple[str, ...] = (),
) -> Estimate:
    found = estimate(shape, engine, context_length=context, concurrency=slots, gpus=gpus, args=args)
    assert isinstance(found, Estimate)
    return found


def total(
    shape: ModelShape, engine: Engine = Engine.LLAMACPP, context: int = 2048, slots: int = 4, gpus: int = 0
) -> int:
    return parts(shape, engine, context, slots, gpus).total


@pytest.mark.parametrize(
    ("context", "slots", "measured"),
    [(2048, 1, 210), (512, 4, 214), (8192, 1, 345), (2048, 4, 348), (8192, 4, 889), (2048, 16, 903)],
)
def test_estimate_is_never_below_what_was_measured_and_within_a_tenth(context: int, slots: int, measured: int) -> None:
    assert measured * MIB <= total(SMOLLM2, context=context, slots=slots) <= 1.1 * measured * MIB


def test_kv_cache_is_two_layers_heads_dim_bytes() -> None:
    assert parts(SMOLLM2).kv_cache == 2 * 30 * 3 * 64 * 2 * 2048 * 4 == 180 * MIB


def test_real_model_has_the_measured_shape() -> None:
    model = os.environ.get("LLMGW_TEST_MODEL")
    if not model:
        pytest.skip("LLMGW_TEST_MODEL does not name a GGUF file")
    path = Path(model)
    data = path.read_bytes()[: 8 * MIB]
    found = read_gguf(path.name, path.stat().st_size, lambda at, length: data[at : at + length])
    assert shape_from_gguf(found, found.stored) == SMOLLM2


@given(st.integers(1, 100_000), st.integers(1, 64), st.integers(0, 8), st.sampled_from(list(Engine)))
def test_estimate_grows_with_what_is_asked(context: int, slots: int, gpus: int, engine: Engine) -> None:
    base = total(SMOLLM2, engine, context, slots, gpus)
    assert base >= SMOLLM2.weights_bytes // max(1, gpus)
    assert total(SMOLLM2, engine, context + 1, slots, gpus) >= base
    assert total(SMOLLM2, engine, context, slots + 1, gpus) >= base


def test_default_context_is_capped() -> None:
    assert default_context(SMOLLM2) == DEFAULT_CONTEXT
    assert default_context(shape_from_gguf(header({**LLAMA, "llama.context_length": 512}), 1)) == 512
    assert default_context(ModelShape("x", 1)) == DEFAULT_CONTEXT


def test_every_engine_has_a_format_and_architectures() -> None:
    assert set(FORMATS) == set(ARCHITECTURES) == set(Engine)
    assert all(FORMATS[engine_for(each)] is each for each in Format)
    assert {"llama", "qwen2", "gemma3", "gpt-oss"} <= ARCHITECTURES[Engine.LLAMACPP]
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM"} <= ARCHITECTURES[Engine.VLLM] & ARCHITECTURES[Engine.SGLANG]


# -- the KV cache -----------------------------------------------------------------------------------------------------

PLAIN = Layer(kv_heads=4, key_dim=64, value_dim=64)
ONE = ModelShape("llama", 0, (PLAIN,), heads=8, embedding=512, feed_forward=1, vocabulary=1)
TOKEN = 2 * 4 * 64 * 2


def layered(*layers: Layer) -> ModelShape:
    return replace(ONE, layers=layers)


@pytest.mark.parametrize(
    ("shape", "context", "slots", "args", "cache"),
    [
        (ONE, 1024, 2, (), 2048 * TOKEN),
        (ONE, 1000, 2, (), 2048 * TOKEN),  # in steps of 256
        (ONE, 1024, 2, ("cache_type_k=8", "cache_type_v=8"), 2048 * TOKEN * 34 // 64),
        (ONE, 1024, 2, ("cache-type-k=8",), 2048 * TOKEN * (34 + 64) // 128),
        (ONE, 1024, 2, ("cache_type_k=99",), 2048 * TOKEN),
        (layered(replace(PLAIN, window=512)), 4096, 2, (), 2 * 1024 * TOKEN),
        (layered(replace(PLAIN, window=512)), 4096, 2, ("n_ubatch=64",), 2 * 768 * TOKEN),
        (layered(replace(PLAIN, window=512)), 4096, 2, ("kv_unified=true",), 1536 * TOKEN),
        (layered(replace(PLAIN, window=512)), 4096, 2, ("swa_full=true",), 8192 * TOKEN),
        (layered(replace(PLAIN, window=512)), 512, 2, (), 1024 * TOKEN),
        (layered(PLAIN, Layer(state=1000)), 1024, 2, (), 2048 * TOKEN + 2 * 4000),
        (layered(PLAIN, Layer()), 1024, 2, (), 2048 * TOKEN),
        (layered(Layer(kv_heads=1, key_dim=576, latent=True)), 1024, 1, (), 1024 * 576 * 2),
    ],
)
def test_cache_of_llamacpp(shape: ModelShape, context: int, slots: int, args: tuple[str, ...], cache: int) -> None:
    assert parts(shape, context=context, slots=slots, args=args).kv_cache == cache


@pytest.mark.parametrize(
    ("shape", "gpus", "args", "cache"),
    [
        (ONE, 0, (), 4096 * TOKEN),
        (ONE, 2, (), 4096 * TOKEN // 2),
        (ONE, 8, (), 4096 * TOKEN // 4),  # four heads cannot be divided among eight
        (ONE, 0, ("--kv-cache-dtype", "fp8"), 4096 * TOKEN // 2),
        (ONE, 0, ("--kv_cache_dtype=fp8_e5m2",), 4096 * TOKEN // 2),
        (ONE, 0, ("--dtype=float32",), 4096 * TOKEN * 2),
        (ONE, 0, ("--kv-cache-dtype=auto", "--dtype", "bfloat16"), 4096 * TOKEN),
        (layered(replace(PLAIN, window=256)), 0, ("--max-num-batched-tokens=512",), 2 * 768 * TOKEN),
        (layered(replace(PLAIN, window=256)), 0, (), 4096 * TOKEN),
        (layered(Layer(kv_heads=1, key_dim=512, value_dim=64, latent=True)), 8, (), 4096 * 576 * 2),
        (layered(Layer(state=1000)), 2, (), 2 * 2000),
    ],
)
def test_cache_of_vllm(shape: ModelShape, gpus: int, args: tuple[str, ...], cache: int) -> None:
    """Two requests of 2,048 tokens."""
    assert parts(shape, Engine.VLLM, context=2048, slots=2, gpus=gpus, args=args).kv_cache == cache


def test_gpus_of_llamacpp_share_whole_layers() -> None:
    three = parts(layered(PLAIN, PLAIN, PLAIN), gpus=2)
    assert three.kv_cache == 2 * 2048 * 4 * TOKEN, "one of two GPUs has two of three layers"


def test_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(SMOLLM2, Engine.LLAMACPP) == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token(SMOLLM2, Engine.LLAMACPP, ("cache_type_k=8", "cache_type_v=8")) == 2 * 30 * 204
    assert kv_bytes_per_token(SMOLLM2, Engine.VLLM, ("--kv-cache-dtype=fp8",)) == 2 * 30 * 3 * 64

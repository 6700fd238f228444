"""Shapes out of headers and configs, as tables: heads, windows, latent vectors, states; and what is left out, named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.estimate import Estimate, estimate
from fleet.shape import Layer, ModelShape
from fleet.shape_config import shape_from_config
from fleet.shape_gguf import shape_from_gguf
from fleet.spec import Engine
from tests.ggufs import LLAMA, Strings
from tests.headers import QWEN, header


def of(architecture: str, **more: object) -> ModelShape:
    """A GGUF like LLAMA, of another architecture; a key of None is left out. `__` stands for a dot."""
    named = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()}
    named["general.architecture"] = architecture
    for key, value in more.items():
        named[f"{architecture}.{key.replace('__', '.')}"] = value
    return shape_from_gguf(header({key: value for key, value in named.items() if value is not None}), 1)


def test_shape_of_a_gguf() -> None:
    layer = Layer(kv_heads=2, key_dim=16, value_dim=16)
    assert shape_from_gguf(header(LLAMA), 1000) == ModelShape("llama", 1000, (layer, layer), 4, 64, 128, 100, 8192)


@pytest.mark.parametrize(
    ("architecture", "more", "layers"),
    [
        ("llama", {"attention__head_count_kv": (4, 0)}, [(4, 16, 16), (0, 16, 16)]),
        ("llama", {"attention__key_length": 32, "attention__value_length": 24}, [(2, 32, 24)] * 2),
        ("llama", {"attention__head_count_kv": None}, [(4, 16, 16)] * 2),
        (
            "deepseek2",
            {"attention__key_length": 576, "attention__key_length_mla": 192, "attention__head_count_kv": 1},
            [(1, 576, 0)] * 2,
        ),
    ],
)
def test_what_layers_keep_of_a_token(
    architecture: str, more: dict[str, object], layers: list[tuple[int, int, int]]
) -> None:
    shape = of(architecture, **more)
    assert [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in shape.layers] == layers
    assert shape.missing == ()


@pytest.mark.parametrize(
    ("architecture", "more", "windows"),
    [
        ("gemma2", {"block_count": 4}, [512, 0, 512, 0]),
        ("gemma3", {"block_count": 7}, [512, 512, 512, 512, 512, 0, 512]),
        ("gpt-oss", {"block_count": 3}, [512, 0, 512]),
        ("cohere2", {"block_count": 5}, [512, 512, 512, 0, 512]),
        ("cohere2", {"block_count": 2, "attention__sliding_window_pattern": 2}, [512, 0]),
        ("gemma3", {"block_count": 3, "attention__sliding_window_pattern": (0, 1, 1)}, [0, 512, 512]),
        ("llama", {"block_count": 2}, [0, 0]),  # mistral's window is not used by llama.cpp
        ("phi3", {"block_count": 2}, [0, 0]),
    ],
)
def test_windows_of_a_gguf(architecture: str, more: dict[str, object], windows: list[int]) -> None:
    shape = of(architecture, attention__sliding_window=512, **more)
    assert [layer.window for layer in shape.layers] == windows


SSM = {"ssm__inner_size": 128, "ssm__state_size": 16, "ssm__conv_kernel": 4}


@pytest.mark.parametrize(
    ("architecture", "more", "states"),
    [
        ("mamba", {**SSM, "attention__head_count": 0, "attention__head_count_kv": 0}, [(0, 2432)] * 2),
        ("jamba", {**SSM, "attention__head_count_kv": (0, 2)}, [(0, 2432), (2, 0)]),
        ("falcon-h1", {**SSM, "ssm__group_count": 1}, [(2, 2528)] * 2),
        ("qwen3next", {**SSM, "block_count": 4}, [(0, 2432)] * 3 + [(2, 0)]),
        ("lfm2", {"shortconv__l_cache": 3, "attention__head_count_kv": (0, 2)}, [(0, 128), (2, 0)]),
    ],
)
def test_states_of_a_gguf(architecture: str, more: dict[str, object], states: list[tuple[int, int]]) -> None:
    shape = of(architecture, **more)
    assert [(layer.kv_heads, layer.state) for layer in shape.layers] == states
    assert shape.missing == ()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"llama.block_count": 0}, "number of layers"),
        ({"llama.block_count": 2**31}, "number of layers"),
        ({"llama.attention.head_count_kv": (1, 2, 3), "llama.attention.head_count": (1, 2, 3)}, "number of KV heads"),
        ({"llama.attention.head_count": 0, "llama.attention.head_count_kv": 0}, "number of KV heads"),
        ({"llama.embedding_length": "wide"}, "embedding length"),
        ({"llama.embedding_length": float("nan")}, "embedding length"),
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
    layers = (Layer(kv_heads=2, key_dim=64, value_dim=64),) * 24
    assert shape_from_config(QWEN, 988_097_824) == ModelShape(
        "Qwen2ForCausalLM", 988_097_824, layers, 14, 896, 4864, 151936, 32768
    )
    assert len(shape_from_config({"architectures": ["X"], "text_config": QWEN}, 1).layers) == 24


def config(**more: object) -> ModelShape:
    return shape_from_config({**QWEN, "num_hidden_layers": 4, **more}, 1)


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 512}, [512] * 4),
        ({"sliding_window": None}, [0] * 4),
        ({"sliding_window": 512, "use_sliding_window": False}, [0] * 4),
        ({"sliding_window": 512, "model_type": "qwen2", "max_window_layers": 3}, [0, 0, 0, 512]),
        ({"sliding_window": 512, "model_type": "gemma2"}, [512, 0, 512, 0]),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, [512, 512, 512, 0]),
        ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 2}, [0, 512, 0, 512]),
        ({"attention_chunk_size": 99, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, [99] * 3 + [0]),
    ],
)
def test_windows_of_a_config(more: dict[str, object], windows: list[int]) -> None:
    assert [layer.window for layer in config(**more).layers] == windows


def test_latent_attention_keeps_one_vector() -> None:
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    latent = config(model_type="deepseek_v3", **ranks).layers[0]
    assert (latent.kv_heads, latent.per_token, latent.latent) == (1, 576, True)
    expanded = config(model_type="minicpm3", **ranks).layers[0]
    assert (expanded.kv_heads, expanded.per_token, expanded.latent) == (14, 14 * 2 * 192, False)


MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON = {"ssm_state_size": 16, "conv_kernel": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1}


@pytest.mark.parametrize(
    ("more", "states"),
    [
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, **MAMBA}, "ssas"),
        ({"model_type": "bamba", "attn_layer_indices": [1], **MAMBA}, "sass"),
        ({"model_type": "falcon_h1", **MAMBA}, "bbbb"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*", **NEMOTRON}, "s-sa"),
        ({"model_type": "qwen3_next", **DELTA}, "sssa"),
        ({"model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}, "sasa"),
        ({"model_type": "mamba2", "state_size": 16, "conv_kernel": 4, "num_heads": 4, "head_dim": 8}, "ssss"),
    ],
)
def test_states_of_a_config(more: dict[str, object], states: str) -> None:
    shape = config(**more)
    kinds = {(True, False): "a", (False, True): "s", (True, True): "b", (False, False): "-"}
    assert "".join(kinds[bool(layer.kv_heads), bool(layer.state)] for layer in shape.layers) == states
    assert shape.missing == ()


@pytest.mark.parametrize(
    "more",
    [
        {"ssm_cfg": {}},
        {"model_type": "new", **MAMBA},
        {"model_type": "jamba", "mamba_d_state": 16},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M", **NEMOTRON},
        {"layer_types": ["conv", "who knows"] * 2, "conv_L_cache": 3},
        {"linear_attn_config": {"kda_layers": [1]}},
    ],
)
def test_a_state_that_cannot_be_told_is_unknown(more: dict[str, object]) -> None:
    if more.get("model_type") == "jamba":
        more = {**more, "mamba_d_conv": 0, "attn_layer_period": 2, "attn_layer_offset": 1}
    assert config(**more).missing == ("size of its recurrent state",)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *QWEN,
                *("head_dim", "text_config", "kv_lora_rank", "layer_types", "sliding_window", "max_window_layers"),
                *("sliding_window_pattern", "model_type", "mamba_d_state", "attn_layer_indices"),
            ]
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.sampled_from(["qwen2", "jamba", "bamba", "mamba", "gemma3_text"])
        | st.lists(st.integers(), max_size=2),
    )
)
def test_any_config_gives_a_shape(config: dict[str, object]) -> None:
    shape = shape_from_config(config, 1)
    found = estimate(shape, Engine.VLLM, context_length=10, concurrency=1, gpus=0)
    assert found == shape.missing if shape.missing else isinstance(found, Estimate)

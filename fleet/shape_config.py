"""A model's shape from a Hugging Face `config.json`, as vLLM and SGLang read it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleet.shape import MAX_LAYERS, Layer, ModelShape, checked, whole

LATENT = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "longcat_flash"})
"""`model_type`s whose latent attention the engines keep as one vector for all heads; others with a `kv_lora_rank`
(minicpm3) keep full heads."""

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
    },
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
}
"""What a config leaves out where the engines' own class for it has a default: Google's Gemma configs do."""

ALTERNATING = {"gemma2": 2}
"""Of each so many layers all but the last have a window, where the config has no list of them."""

WINDOWED = frozenset({"sliding_attention", "chunked_attention"})
ATTENDING = frozenset({"full_attention", "attention"}) | WINDOWED
RECURRENT = frozenset({"conv", "linear_attention", "mamba", "mamba2"})

RECURRENT_KEYS = frozenset(
    {"attn_layer_period", "conv_L_cache", "hybrid_override_pattern", "layers_block_type", "linear_num_key_heads"}
) | {"linear_attn_config", "mamba_d_state", "mamba_expand", "mb_per_layer", "ssm_cfg", "ssm_state_size", "state_size"}
"""Any of these says that layers are recurrent; which and how large is told by `_kinds` and `_state`, or unknown."""


def shape_from_config(config: Mapping[str, object], weights_bytes: int) -> ModelShape:
    """The shape; a multimodal model's language part stands in `text_config`."""
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    inner = config.get("text_config")
    text = _Text(inner if isinstance(inner, Mapping) else config)
    layers = text.number("num_hidden_layers", "n_layer", "num_layers")
    layers = layers if layers <= MAX_LAYERS else 0
    kinds = _kinds(text, layers)
    state = _state(text)
    attention = _attention(text)
    recurrent = any(text.has(key) for key in RECURRENT_KEYS)
    unread = recurrent and (kinds is None or (any(kind in RECURRENT for kind in kinds) and not state))
    shape = ModelShape(
        architecture=architecture,
        weights_bytes=weights_bytes,
        layers=tuple(
            _layer(text, attention, kind, index, state, layers) for index, kind in enumerate(kinds or ("",) * layers)
        ),
        heads=text.number("num_attention_heads", "n_head"),
        embedding=text.number("hidden_size", "n_embd", "d_model"),
        feed_forward=text.number("intermediate_size", "n_inner"),
        vocabulary=text.number("vocab_size"),
        context_length=text.number("max_position_embeddings", "n_positions", "max_sequence_length"),
    )
    return checked(shape, unread="size of its recurrent state" if unread else "", vocabulary=False)


@dataclass(frozen=True)
class _Text:
    """The config of the language part, with what its class says where it is silent."""

    config: Mapping[str, object]

    @property
    def model_type(self) -> str:
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def number(self, *keys: str) -> int:
        """The first of these that is a count; 0 where none is."""
        defaults = DEFAULTS.get(self.model_type, {})
        told = (whole(source.get(key)) for source in (self.config, defaults) for key in keys)
        return next((number for number in told if number), 0)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; empty where it is none."""
        found = self.config.get(key)
        return tuple(str(name) for name in found) if isinstance(found, list) and len(found) <= MAX_LAYERS else ()


def _attention(text: _Text) -> Layer:
    """What an attending layer keeps."""
    heads = text.number("num_attention_heads", "n_head")
    embedding = text.number("hidden_size", "n_embd", "d_model")
    head_dim = text.number("head_dim", "attention_head_dim") or (embedding // heads if heads else 0)
    kv_heads = text.number("num_key_value_heads", "num_kv_heads") or heads
    if text.config.get("multi_query") is True:
        kv_heads = 1  # GPT-BigCode and the first Falcon
    latent = text.number("kv_lora_rank")
    if latent and text.model_type in LATENT:
        # with the part that is rotated; and, for sparse attention, the index that picks tokens
        beside = text.number("qk_rope_head_dim") + text.number("index_head_dim")
        return Layer(kv_heads=1, key_dim=latent, value_dim=beside, latent=True)
    if latent:
        head_dim = text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim")
        return Layer(kv_heads=heads, key_dim=head_dim, value_dim=head_dim)
    return Layer(kv_heads=kv_heads, key_dim=head_dim, value_dim=text.number("v_head_dim") or head_dim)


def _layer(text: _Text, attention: Layer, kind: str, index: int, state: int, layers: int) -> Layer:
    if kind in RECURRENT:
        return Layer(state=state)
    if kind == "none":
        return Layer()
    both = state if kind == "both" else 0
    return replace(attention, window=_window(text, kind, index, layers), state=both)


def _window(text: _Text, kind: str, index: int, layers: int) -> int:
    if kind == "chunked_attention":
        return text.number("attention_chunk_size")
    window = text.number("sliding_window")
    if kind:
        return window if kind in WINDOWED else 0
    if not window or text.config.get("use_sliding_window") is False:
        return 0
    if text.has("max_window_layers") and text.model_type.startswith("qwen"):
        first = text.config["max_window_layers"]
        return window if isinstance(first, int) and first <= index < layers else 0
    period = text.number("sliding_window_pattern") or ALTERNATING.get(text.model_type, 0)
    return 0 if period and (index + 1) % period == 0 else window


def _kinds(text: _Text, layers: int) -> tuple[str, ...] | None:
    """Each layer's kind; "" where all are alike and attend; None where that is not told."""
    named = text.names("layer_types") or text.names("layers_block_type")
    if named:
        known = all(kind in ATTENDING or kind in RECURRENT for kind in named)
        return named if known and len(named) == layers else None
    if text.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return ("mamba",) * layers
    if text.model_type == "falcon_h1":
        return ("both",) * layers
    if text.model_type == "jamba":
        period, offset = text.number("attn_layer_period"), text.number("attn_layer_offset")
        return tuple("attention" if period and n % period == offset else "mamba" for n in range(layers))
    if text.model_type == "bamba":
        listed = text.config.get("attn_layer_indices")
        attending = listed if isinstance(listed, list) else []
        return tuple("attention" if n in attending else "mamba" for n in range(layers))
    if text.model_type == "nemotron_h":
        pattern = text.config.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or len(pattern) != layers or not set(pattern) <= set("M*-E"):
            return None
        return tuple({"M": "mamba", "*": "attention"}.get(letter, "none") for letter in pattern)
    if text.model_type == "qwen3_next":
        every = text.number("full_attention_interval") or 4  # the default of its class
        return tuple("attention" if (n + 1) % every == 0 else "linear_attention" for n in range(layers))
    return None if any(text.has(key) for key in RECURRENT_KEYS) else ("",) * layers


def _state(text: _Text) -> int:
    """Numbers of one recurrent layer's state: what its convolution still sees, and what it has summed up."""
    hidden = text.number("hidden_size", "d_model")
    if text.has("linear_num_key_heads"):  # gated delta net
        keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim")
        values = text.number("linear_num_value_heads") * text.number("linear_value_head_dim")
        kernel = text.number("linear_conv_kernel_dim")
        return (2 * keys + values) * (kernel - 1) + values * text.number("linear_key_head_dim") if kernel else 0
    if text.has("conv_L_cache"):
        return hidden * text.number("conv_L_cache")
    kernel = text.number("mamba_d_conv", "conv_kernel", "mamba_conv_kernel")
    state = text.number("mamba_d_state", "ssm_state_size", "state_size")
    heads = text.number("mamba_n_heads", "mamba_num_heads") or (
        text.number("num_heads") if text.model_type == "mamba2" else 0
    )
    width = text.number("mamba_d_head", "mamba_head_dim") or (text.number("head_dim") if heads else 0)
    expand = text.number("mamba_expand", "expand") or 2  # the default of every such class
    inner = (heads * width) or text.number("mamba_d_ssm", "intermediate_size_mamba") or expand * hidden
    if text.model_type in ("mamba", "falcon_mamba"):
        inner = text.number("intermediate_size") or inner
    groups = text.number("mamba_n_groups", "n_groups") if heads else 0
    if not kernel or not state or not inner:
        return 0
    return (kernel - 1) * (inner + 2 * groups * state) + inner * state

"""A model's shape from the metadata of a GGUF file, as llama.cpp reads it."""

from collections.abc import Mapping

from fleet.gguf import Gguf
from fleet.shape import MAX_LAYERS, Layer, ModelShape, checked, whole

PERIODS: Mapping[str, int] = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "llama4": 4,
    "olmo2": 4,
    "smallthinker": 4,
}
"""Of each so many layers, all but the last look back a window only: `set_swa_pattern` in llama.cpp's `src/models`.

Architectures that are not here keep all tokens in llama.cpp, even where the header names a window (phi3, mistral); or
they are newer, and counted whole, which is never too little."""

LLAMA4_CHUNK = 8192
"""Tokens: llama4's window stands in llama.cpp and not in the header."""

STATES = frozenset({"falcon-h1", "granitehybrid", "jamba", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"}) | {
    "nemotron_h_moe",
    "plamo2",
    "qwen35",
    "qwen35moe",
    "qwen3next",
}
"""Recurrent architectures whose states follow from the header as below: `n_embd_r` and `n_embd_s` in llama.cpp."""

FULL_EVERY: Mapping[str, int] = {"qwen35": 4, "qwen35moe": 4, "qwen3next": 4}
"""Of each so many layers the last attends, and the others are recurrent; `full_attention_interval` may say so too."""

RECURRENT_KEYS = ("ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")


def shape_from_gguf(header: Gguf, weights_bytes: int) -> ModelShape:
    """The shape in a header; `weights_bytes` are those of the tensors in all shards."""
    count = whole(header.of_model("block_count"))
    count = count if count <= MAX_LAYERS else 0
    heads = _per_layer(header.of_model("attention.head_count"), count)
    kv_heads = _per_layer(header.of_model("attention.head_count_kv"), count) or heads
    embedding = whole(header.of_model("embedding_length"))
    most = max(heads, default=0)
    head_dim = embedding // most if most else 0
    key_dim = whole(header.of_model("attention.key_length")) or head_dim
    value_dim = whole(header.of_model("attention.value_length")) or head_dim
    latent = header.of_model("attention.key_length_mla") is not None
    recurrent = any(header.of_model(key) is not None for key in RECURRENT_KEYS)
    known = header.architecture in STATES
    pure = header.architecture in ("mamba", "mamba2")
    state = _state(header, embedding) if recurrent and known else 0
    layers = tuple(
        Layer(
            # the latent vector stands in the keys, and its first part is the values too
            kv_heads=0 if pure or not _attends(header, index) else kv_heads[index] if kv_heads else 0,
            key_dim=key_dim,
            value_dim=0 if latent else value_dim,
            window=_window(header, index),
            state=state if _remembers(header, index, kv_heads) else 0,
            latent=latent,
        )
        for index in range(count)
    )
    forward = header.of_model("feed_forward_length")
    widest = max(forward, default=0) if isinstance(forward, tuple) else forward
    experts = whole(header.of_model("expert_feed_forward_length")) * whole(header.of_model("expert_used_count"))
    shape = ModelShape(
        architecture=header.architecture,
        weights_bytes=weights_bytes,
        layers=layers if heads or kv_heads or pure else tuple(Layer() for _ in layers),
        heads=most,
        embedding=embedding,
        # The usual ratio where it is not told; it moves the estimate by a few MiB only.
        feed_forward=max(whole(widest), experts) or 4 * embedding,
        vocabulary=header.lengths.get("tokenizer.ggml.tokens", 0) or whole(header.of_model("vocab_size")),
        context_length=whole(header.of_model("context_length")),
    )
    return checked(shape, unread="size of its recurrent state" if recurrent and not state else "")


def _per_layer(value: object, layers: int) -> tuple[int, ...]:
    if isinstance(value, tuple):
        counts = tuple(count if isinstance(count, int) and 0 <= count < 2**16 else -1 for count in value)
        return counts if len(counts) == layers and min(counts, default=-1) >= 0 else ()
    return (whole(value),) * layers if whole(value) else ()


def _window(header: Gguf, index: int) -> int:
    window = whole(header.of_model("attention.sliding_window"))
    if header.architecture == "llama4":
        window = window or LLAMA4_CHUNK
    if header.architecture not in PERIODS or not window:
        return 0
    pattern = header.of_model("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return window if index < len(pattern) and pattern[index] else 0
    period = whole(pattern) or PERIODS[header.architecture]
    return window if index % period < period - 1 else 0


def _attends(header: Gguf, index: int) -> bool:
    every = _full_every(header)
    return not every or (index + 1) % every == 0


def _remembers(header: Gguf, index: int, kv_heads: tuple[int, ...]) -> bool:
    """Whether this layer is recurrent."""
    if header.architecture in ("mamba", "mamba2", "falcon-h1"):
        return True  # the last has both in each layer
    if _full_every(header):
        return not _attends(header, index)
    return bool(kv_heads) and kv_heads[index] == 0  # in nemotron_h some of those only feed forward: counted, tiny


def _full_every(header: Gguf) -> int:
    default = FULL_EVERY.get(header.architecture, 0)
    return (whole(header.of_model("full_attention_interval")) or default) if default else 0


def _state(header: Gguf, embedding: int) -> int:
    """Numbers of one layer's state: what the convolution still sees, and what it has summed up."""
    cache = whole(header.of_model("shortconv.l_cache"))
    if cache:
        return embedding * (cache - 1)
    inner, state = whole(header.of_model("ssm.inner_size")), whole(header.of_model("ssm.state_size"))
    groups, kernel = whole(header.of_model("ssm.group_count")), whole(header.of_model("ssm.conv_kernel"))
    if not inner or not state or not kernel:
        return 0
    return (kernel - 1) * (inner + 2 * groups * state) + inner * state

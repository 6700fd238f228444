"""Does one shard of a model fit: what its header says it is, what memory it will take, and which nodes have that much.

An answer is a number or "unknown": where the header leaves something out, nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fleet.gguf import Gguf
from fleet.records import Record
from fleet.render import size
from fleet.room import Room, room_of
from fleet.spec import Engine, ShardNeed
from fleet.state import CPU, FleetState, NodeRecord, NodeState

MIB = 1024**2
GIB = 1024**3

DEFAULT_CONTEXT = 4096
"""Tokens, where the operator names none and the model can do more: each token costs KV cache for every request at
once, so a model's full 128k would not fit most machines, and on a CPU its prompt would take minutes."""

MAX_LAYERS = 4096
"""The deepest models have some 130; more is a damaged header."""

KV_BYTES = 2
"""f16 keys and values: what all three engines use for f16, bf16 and quantized weights unless told otherwise."""

# llama.cpp, measured: SmolLM2-135M Q4_1 (98.4 MB; 30 layers, 3 KV heads of 64, vocabulary 49,152) on xllamacpp
# 2026.10.11549, two cores, `cache_ram_mib` 0, RSS in MiB while all slots answer long prompts:
#   context of all slots   2048    2048    8192    8192   32768   32768
#   slots                     1       4       1       4       4      16
#   RSS                     210     214     345     348     889     903
#   weights + KV cache      139     139     274     274     814     814
# What is left is 71 MiB and 1.2 MiB a slot. Python and the library alone are 29 MiB, and the engine's log says 17 MiB
# for the compute buffer; the rest goes with the vocabulary. The constants below give 2 to 4 % more than measured.
LLAMACPP_PROCESS = 34 * MIB
LLAMACPP_PER_TOKEN_OF_VOCABULARY = 512
"""Bytes: text, hash tables and merges of the tokenizer."""
LLAMACPP_PER_SLOT_AND_TOKEN_OF_VOCABULARY = 28
"""Bytes: logits, and the sampler's candidates."""
LLAMACPP_BATCH = 512
"""Tokens of one compute step (`n_ubatch`)."""

# vLLM on a CPU: 2.6 GB at its peak with 1 GiB of KV cache and 0.27 GB of weights, three processes with PyTorch.
TORCH_CPU_OVERHEAD = int(1.5 * GIB)
# On a GPU: not measured here. CUDA's context and NCCL take about half a GiB; activations and CUDA graphs at the
# engines' default batch size about one more for models up to 10 GiB a GPU, and grow with the weights.
TORCH_GPU_OVERHEAD = int(1.5 * GIB)
TORCH_GPU_SHARE_OF_WEIGHTS = 0.05


class Estimate(Record):
    """Where a shard's memory goes, in bytes; on each GPU where it uses several."""

    weights: int
    kv_cache: int
    overhead: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.overhead


class FitVerdict(StrEnum):
    """Whether one shard fits any node of the fleet when that node is empty."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ModelShape:
    """What decides a model's memory. A number that the weights do not tell is 0 and named in `missing`."""

    architecture: str
    weights_bytes: int
    layers: int = 0
    kv_heads: tuple[int, ...] = ()
    """For each layer."""
    key_dim: int = 0
    value_dim: int = 0
    embedding: int = 0
    feed_forward: int = 0
    vocabulary: int = 0
    context_length: int = 0
    """The longest the model was made for."""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """A need against the fleet's nodes, each as if it were empty."""

    verdict: FitVerdict
    sentence: str
    candidate: str = ""
    """A ready node that could take it, the one with most free; empty where there is none just now."""


def default_context(shape: ModelShape) -> int:
    """The context length where nobody chose one."""
    return min(shape.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def shape_from_gguf(header: Gguf, weights_bytes: int) -> ModelShape:
    """The shape in a GGUF's header; `weights_bytes` is the size of all shards."""
    layers = _whole(header.of_model("block_count"))
    heads = _per_layer(header.of_model("attention.head_count"), layers)
    kv_heads = _per_layer(header.of_model("attention.head_count_kv"), layers) or heads
    embedding = _whole(header.of_model("embedding_length"))
    head_dim = embedding // heads[0] if heads and heads[0] else 0
    forward = header.of_model("feed_forward_length")
    key_dim = _whole(header.of_model("attention.key_length")) or head_dim
    value_dim = _whole(header.of_model("attention.value_length")) or head_dim
    if header.of_model("attention.key_length_mla") is not None:
        value_dim = 0  # latent attention keeps one vector for keys and values
    vocabulary = header.lengths.get("tokenizer.ggml.tokens", 0) or _whole(header.of_model("vocab_size"))
    # Recurrent layers keep a state of their own, which llama.cpp sizes by architecture, not by these keys.
    recurrent = any(
        key.startswith((f"{header.architecture}.ssm.", f"{header.architecture}.wkv")) for key in header.metadata
    )
    return _shape(
        header.architecture,
        weights_bytes,
        layers,
        kv_heads,
        key_dim,
        value_dim,
        embedding,
        max(forward) if isinstance(forward, tuple) and forward else forward,
        vocabulary,
        _whole(header.of_model("context_length")),
        recurrent,
    )


def shape_from_config(config: Mapping[str, object], weights_bytes: int) -> ModelShape:
    """The shape in a Hugging Face `config.json`; a multimodal model's language part stands in `text_config`."""
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config

    def first(*keys: str) -> int:
        return next((number for key in keys if (number := _whole(text.get(key)))), 0)

    layers = first("num_hidden_layers", "n_layer", "num_layers")
    heads = first("num_attention_heads", "n_head")
    embedding = first("hidden_size", "n_embd", "d_model")
    head_dim = first("head_dim") or (embedding // heads if heads else 0)
    kv_heads = _per_layer(first("num_key_value_heads") or heads, layers)
    value_dim = first("v_head_dim") or head_dim
    if latent := first("kv_lora_rank"):  # one vector for keys and values of all heads, with the part that is rotated
        kv_heads, head_dim, value_dim = (1,) * layers if layers <= MAX_LAYERS else (), latent, first("qk_rope_head_dim")
    recurrent = any(key in text for key in ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads"))
    return _shape(
        architecture,
        weights_bytes,
        layers,
        kv_heads,
        head_dim,
        value_dim,
        embedding,
        first("intermediate_size", "n_inner"),
        first("vocab_size"),
        first("max_position_embeddings", "n_positions", "max_sequence_length"),
        recurrent,
    )


def estimate(
    shape: ModelShape, engine: Engine, *, context_length: int, concurrency: int, gpus: int
) -> Estimate | tuple[str, ...]:
    """Bytes one shard takes on each GPU, or of RAM where `gpus` is 0; or what is missing to tell.

    All slots are counted full: `concurrency` requests of `context_length` tokens each. Sliding windows and shared
    layers are counted whole, so the estimate is never too low for them.
    """
    if shape.missing:
        return shape.missing
    parts = max(1, gpus)
    per_token = sum(shape.kv_heads) * (shape.key_dim + shape.value_dim) * KV_BYTES
    kv_cache = per_token * context_length * concurrency
    weights = -(-shape.weights_bytes // parts)
    if engine is Engine.LLAMACPP:
        overhead = _llamacpp_overhead(shape, concurrency)
    elif gpus:
        overhead = TORCH_GPU_OVERHEAD + int(weights * TORCH_GPU_SHARE_OF_WEIGHTS)
    else:
        overhead = TORCH_CPU_OVERHEAD
    return Estimate(weights=weights, kv_cache=-(-kv_cache // parts), overhead=overhead)


def judge(state: FleetState, name: str, engine: Engine, need: ShardNeed) -> Judgement:
    """Whether any member that offers the engine could run such a shard if it were empty; none is not a no."""
    wanted = f"{name} needs {_need(need)}"
    members = [node for node in state.nodes.values() if node.state is not NodeState.LOST]
    offering = [node for node in members if any(offer.engine is engine for offer in node.inventory.engines)]
    if not offering:
        why = f"no node offers {engine} yet" if members else "no node has joined yet"
        return Judgement(FitVerdict.UNKNOWN, f"{why}; {wanted}")
    fitting = [node for node in offering if _fits(node, need)]
    if not fitting:
        return Judgement(FitVerdict.DOES_NOT_FIT, f"{wanted} for one shard, {_largest(offering, need)}")
    free = room_of(state)
    ready = [node for node in fitting if node.state is NodeState.READY]
    best = max(ready, key=lambda node: (_free(node, need, free), node.id), default=None)
    total = len(offering)
    nodes = f"{fitting[0].id}" if total == 1 else f"{len(fitting)} of {total} nodes"
    return Judgement(FitVerdict.FITS, f"{wanted}; fits {nodes}", best.id if best else "")


def _shape(
    architecture: str,
    weights_bytes: int,
    layers: int,
    kv_heads: tuple[int, ...],
    key_dim: int,
    value_dim: int,
    embedding: int,
    feed_forward: object,
    vocabulary: int,
    context_length: int,
    recurrent: bool,
) -> ModelShape:
    known = {
        "architecture": bool(architecture),
        "number of layers": layers > 0,
        "number of KV heads": len(kv_heads) == layers and any(kv_heads),
        "size of a head": key_dim > 0,
        "embedding length": embedding > 0,
        "vocabulary": vocabulary > 0,
        "size of its recurrent state": not recurrent,
    }
    return ModelShape(
        architecture=architecture,
        weights_bytes=weights_bytes,
        layers=layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        embedding=embedding,
        feed_forward=_whole(feed_forward) or 4 * embedding,  # the usual ratio; it moves the estimate by a few MiB only
        vocabulary=vocabulary,
        context_length=context_length,
        missing=tuple(name for name, there in known.items() if not there),
    )


def _whole(value: object) -> int:
    """A count that can be believed, else 0: headers are hostile, and a million layers or heads do not exist."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**24 else 0


def _per_layer(value: object, layers: int) -> tuple[int, ...]:
    if layers > MAX_LAYERS:
        return ()
    if isinstance(value, tuple):
        counts = tuple(count if isinstance(count, int) and 0 <= count < 2**16 else -1 for count in value)
        return counts if len(counts) == layers and min(counts, default=-1) >= 0 else ()
    return (_whole(value),) * layers if _whole(value) else ()


def _llamacpp_overhead(shape: ModelShape, slots: int) -> int:
    compute = LLAMACPP_BATCH * 4 * (3 * shape.feed_forward + 7 * shape.embedding)
    vocabulary = LLAMACPP_PER_TOKEN_OF_VOCABULARY + LLAMACPP_PER_SLOT_AND_TOKEN_OF_VOCABULARY * slots
    return LLAMACPP_PROCESS + compute + vocabulary * shape.vocabulary


def _devices(node: NodeRecord, need: ShardNeed) -> list[tuple[str, int]]:
    """Uuid and capacity of the devices such a shard can use, the largest first."""
    wanted = [device for device in node.inventory.devices if (device.uuid == CPU) == (need.gpus == 0)]
    return sorted(((device.uuid, device.total) for device in wanted), key=lambda device: -device[1])


def gpus_of(node: NodeRecord) -> int:
    """How many GPUs a node has."""
    return sum(device.uuid != CPU for device in node.inventory.devices)


def _capacity(node: NodeRecord, need: ShardNeed) -> int:
    """What the last of the devices it needs has; 0 where the node has too few."""
    devices = _devices(node, need)
    wanted = max(1, need.gpus)
    return devices[wanted - 1][1] if len(devices) >= wanted else 0


def _fits(node: NodeRecord, need: ShardNeed) -> bool:
    return _capacity(node, need) >= max(1, need.memory) and need.disk <= node.inventory.disk_total


def _free(node: NodeRecord, need: ShardNeed, room: Room) -> int:
    amounts = sorted((room.free(node.id, uuid) for uuid, _ in _devices(node, need)), reverse=True)
    return amounts[max(1, need.gpus) - 1]


def _need(need: ShardNeed) -> str:
    return f"{need.gpus} GPUs with {size(need.memory)} each" if need.gpus > 1 else size(need.memory)


def _largest(nodes: list[NodeRecord], need: ShardNeed) -> str:
    """What the nodes have instead: the memory of the largest, or the GPUs or the disk that nobody has."""
    best = max(nodes, key=lambda node: (_capacity(node, need), node.id))
    capacity = _capacity(best, need)
    if not capacity:
        most = max(nodes, key=lambda node: (len(_devices(node, need)), node.id))
        return f"the node with most GPUs, {most.id}, has {len(_devices(most, need))}"
    if capacity < need.memory:
        return f"the largest node {best.id} has {size(capacity)}"
    disk = max((node for node in nodes if _capacity(node, need) >= need.memory), key=lambda n: n.inventory.disk_total)
    return f"and {size(need.disk)} of disk for its weights, the node {disk.id} has {size(disk.inventory.disk_total)}"

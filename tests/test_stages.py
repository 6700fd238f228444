"""Layers divided over stages: what each holds, by whose rule, and the heaviest one's memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from activities.headers import read_shape
from fleet.check import examine
from fleet.estimate import TORCH_GPU_OVERHEAD, Estimate, estimate, staged
from fleet.fit import FitVerdict
from fleet.paper import Paper, fleet_of
from fleet.reasons import Reason, StepError
from fleet.shape import Layer, ModelShape, Spread
from fleet.spec import Engine, Format, JobRequest, ModelFile, Weights
from runtime.mirrors import reading
from tests.checkpoints import FORWARD, HEAD, HEADS, HIDDEN, KV_HEADS, LAYERS, WORDS, make

GIB = 1024**3
PLAIN = Layer(kv_heads=8, key_dim=128, value_dim=128)


def shape(layers: int, spread: Spread | None, *kinds: Layer) -> ModelShape:
    return ModelShape(
        "LlamaForCausalLM", 0, kinds or (PLAIN,) * layers, heads=64, embedding=8192, vocabulary=1, spread=spread
    )


TEN = shape(10, Spread(layers=(100,) * 10, embedding=50, head=70, rest=4))


@pytest.mark.parametrize(
    ("engine", "stages", "layers", "weights"),
    [
        (Engine.VLLM, 1, [10], [0]),
        (Engine.VLLM, 2, [5, 5], [554, 574]),
        (Engine.VLLM, 3, [3, 4, 3], [354, 404, 374]),
        (Engine.VLLM, 4, [2, 3, 3, 2], [254, 304, 304, 274]),
        (Engine.VLLM, 10, [1] * 10, [154, *[104] * 8, 174]),
        (Engine.SGLANG, 2, [5, 5], [554, 574]),
        (Engine.SGLANG, 3, [3, 3, 4], [354, 304, 474]),
        (Engine.SGLANG, 4, [2, 2, 3, 3], [254, 204, 304, 374]),
    ],
)
def test_what_each_stage_holds(engine: Engine, stages: int, layers: list[int], weights: list[int]) -> None:
    found = staged(TEN, engine, stages)
    assert [len(stage.layers) for stage in found] == layers
    assert [stage.weights_bytes for stage in found] == weights


# Llama 3.1 70B: 80 layers of 1.6 GiB, an embedding and a head of 2 GiB each.
LAYER = 2 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28_672 * 8192 + 2 * 8192)
WORDS_OF_IT = 2 * 128_256 * 8192
SEVENTY = shape(80, Spread(layers=(LAYER,) * 80, embedding=WORDS_OF_IT, head=WORDS_OF_IT, rest=16_384))
KV = 2 * 8 * 128 * 2 * 4096 * 4
"""Of one layer, four requests of 4,096 tokens."""


@pytest.mark.parametrize(
    ("gpus", "nodes", "stages", "weights", "cache"),
    [
        (1, 2, 2, 40 * LAYER + WORDS_OF_IT + 16_384, 40 * KV),
        (2, 2, 2, (40 * LAYER + WORDS_OF_IT + 16_384) // 2, 40 * KV // 2),
        (8, 2, 2, (40 * LAYER + WORDS_OF_IT + 16_384) // 8, 40 * KV // 8),
        (4, 1, 4, 20 * LAYER + WORDS_OF_IT + 16_384, 20 * KV),
        (1, 3, 3, 27 * LAYER + WORDS_OF_IT + 16_384, 27 * KV),  # of 27, 27 and 26
    ],
)
def test_the_heaviest_stage_of_a_large_model(gpus: int, nodes: int, stages: int, weights: int, cache: int) -> None:
    found = estimate(SEVENTY, Engine.VLLM, context_length=4096, concurrency=4, gpus=gpus, nodes=nodes, stages=stages)
    assert found == Estimate(weights=weights, kv_cache=cache, overhead=TORCH_GPU_OVERHEAD + int(weights * 0.05))


def test_the_cache_counts_for_which_stage_is_the_heaviest() -> None:
    kinds = (*(replace(PLAIN, window=128),) * 2, *(PLAIN,) * 2)
    found = estimate(
        shape(4, Spread(layers=(100,) * 4), *kinds),
        Engine.VLLM,
        context_length=65_536,
        concurrency=1,
        gpus=1,
        nodes=2,
        stages=2,
    )
    assert isinstance(found, Estimate)
    assert found.kv_cache == 2 * PLAIN.per_token * 2 * 65_536, "the second stage looks back at all"


def test_without_names_that_tell_the_layers_nothing_is_guessed() -> None:
    found = estimate(shape(10, None), Engine.VLLM, context_length=256, concurrency=1, gpus=1, nodes=2, stages=2)
    assert found == ("layer that each of its tensors belongs to",)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_a_checkpoint_tells_whose_its_bytes_are(tmp_path: Path, kind: str) -> None:
    weights = checkpoint(tmp_path, kind)
    found = read_shape(weights, lambda file: reading(weights.mirror, file))
    assert found.spread is not None
    words = 2 * WORDS * HIDDEN
    assert (found.spread.embedding, found.spread.head, found.spread.rest) == (words, words, 2 * HIDDEN)
    assert len(set(found.spread.layers)) == 1
    own = sum(found.spread.layers) + found.spread.embedding + found.spread.rest
    assert found.weights_bytes == own + (0 if kind == "gemma2" else words), "Gemma's head is its embedding"
    if kind == "llama":
        attention = 2 * HEADS * HEAD * HIDDEN + 2 * KV_HEADS * HEAD * HIDDEN
        assert found.spread.layers[0] == 2 * (attention + 3 * FORWARD * HIDDEN + 2 * HIDDEN)


def test_a_check_of_stages(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path, "llama")
    known = read_shape(weights, lambda file: reading(weights.mirror, file))
    state = fleet_of(Paper(gpus="2x80GiB"))

    def checked(stages: int) -> int:
        wish = JobRequest(name="m", engine=Engine.VLLM, gpus=2, pipeline_parallel=stages)
        found = examine(known, weights, wish, state)
        assert (found.verdict, found.estimate is not None) == (FitVerdict.FITS, True)
        return found.estimate.weights if found.estimate is not None else 0

    words = 2 * WORDS * HIDDEN
    assert checked(2) == checked(1) + HIDDEN, "half of the layers and one of two tables; the norm is on both"
    assert checked(1) == known.weights_bytes // 2 > words
    with pytest.raises(StepError) as caught:
        examine(known, weights, JobRequest(name="m", engine=Engine.VLLM, gpus=16, pipeline_parallel=16), state)
    assert caught.value.failure.reason is Reason.BAD_INPUT
    assert caught.value.failure.detail == f"pipeline_parallel: 16 stages are more than the {LAYERS} layers of m"


def checkpoint(root: Path, kind: str) -> Weights:
    directory = make(root / kind, kind)
    files = tuple(ModelFile(path=path.name, size=path.stat().st_size) for path in sorted(directory.iterdir()))
    return Weights(model_id=kind, format=Format.SAFETENSORS, entry="", files=files, mirror=directory.as_uri())

"""Judgements as tables: one shard against the fleet's nodes, and the smallest parallelism with which it fits."""

from collections.abc import Mapping

import pytest

from fleet.facts import node_joined, node_lost
from fleet.fit import FitVerdict, Parallelism, judge, smallest
from fleet.shape import Layer, ModelShape
from fleet.spec import Engine, ShardNeed
from fleet.state import EngineOffer, FleetState, NodeState
from fleet.wishes import cordon
from tests.fleets import inventory

MIB = 1024**2
GIB = 1024**3

OFFER = (EngineOffer(engine=Engine.LLAMACPP, version="1", installed=True),)


def fleet(**nodes: Mapping[str, object]) -> FleetState:
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


def test_a_node_that_was_silent_is_the_candidate_where_nobody_else_is() -> None:
    state = fleet(n1={"memory": 8 * GIB}, n2={"memory": 64 * GIB})
    asked = [
        judge(state, "big", Engine.LLAMACPP, ShardNeed(memory=GIB), 1, silent) for silent in ((), ("n2",), ("n1", "n2"))
    ]
    assert [found.candidate for found in asked] == ["n2", "n1", "n2"]


def test_lost_node_does_not_count() -> None:
    state = node_lost(fleet(n1={}), "n1", "i", "gone", 1.0)
    assert state.nodes["n1"].state is NodeState.LOST
    assert judge(state, "big", Engine.LLAMACPP, ShardNeed(memory=GIB)).verdict is FitVerdict.UNKNOWN


# -- parallelism ------------------------------------------------------------------------------------------------------

SEVENTY = ModelShape(
    architecture="LlamaForCausalLM",
    weights_bytes=140 * GIB,
    layers=(Layer(kv_heads=8, key_dim=128, value_dim=128),) * 80,
    heads=64,
    embedding=8192,
    vocabulary=128_256,
)
ANY = tuple(EngineOffer(engine=engine, version="1", installed=True) for engine in Engine)


def parallelism(shape: ModelShape, *nodes: tuple[int, ...], engine: Engine = Engine.VLLM) -> Parallelism | None:
    state = fleet(**{f"n{number}": {"gpus": gpus, "engines": ANY} for number, gpus in enumerate(nodes)})
    return smallest(state, shape, engine, context_length=4096, concurrency=4, disk=0)


def test_the_fewest_gpus_that_divide_the_heads() -> None:
    found = parallelism(SEVENTY, (80 * GIB,) * 8)
    assert (found and (found.gpus, found.nodes, found.fits)) == (2, 1, 1)
    found = parallelism(SEVENTY, (48 * GIB,) * 8)
    assert (found and found.gpus) == 4, "three do not divide 64 heads"
    odd = ModelShape(**{**vars(SEVENTY), "heads": 14})
    found = parallelism(odd, (48 * GIB,) * 8)
    assert (found and found.gpus) == 7


def test_more_nodes_only_where_one_is_too_small() -> None:
    assert parallelism(SEVENTY, (48 * GIB,) * 2) is None
    found = parallelism(SEVENTY, *((48 * GIB,) * 2,) * 3)
    assert found is not None
    assert (found.gpus, found.nodes, found.fits) == (2, 2, 3)
    assert found.sentence.startswith("2 GPUs with ")
    assert found.sentence.endswith(" each on each of 2 nodes (3 nodes have that): --gpus 2 --nodes 2")
    assert parallelism(SEVENTY, *((48 * GIB,) * 2,) * 3, engine=Engine.LLAMACPP) is None, "it spans no nodes"


def test_llamacpp_gives_whole_layers_to_each_gpu() -> None:
    found = parallelism(SEVENTY, (64 * GIB,) * 8, engine=Engine.LLAMACPP)
    assert (found and found.gpus) == 3


def test_a_model_whose_need_is_unknown_has_no_parallelism() -> None:
    assert parallelism(ModelShape("X", 1, missing=("number of layers",)), (48 * GIB,)) is None
    assert parallelism(SEVENTY) is None
    assert parallelism(SEVENTY, ()) is None

"""How a gang is asked for, what it needs, what its engines are told, and which of its failures is the cause."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.engines import ADAPTERS
from agent.engines.adapter import Gang, Launch
from fleet.check import examine
from fleet.estimate import Estimate, estimate
from fleet.fit import FitVerdict, judge
from fleet.gangs import first_cause
from fleet.inputs import read_request, request_of, spec_of, updated
from fleet.reasons import Failure, Reason, RefusedError, StepError
from fleet.shape_config import shape_from_config
from fleet.spec import Engine, Format, JobRequest, ModelSpec, ShardNeed, spread_fault
from fleet.state import EngineOffer, FleetState
from fleet.wishes import apply
from tests.fleets import GIB, fleet, inventory, spec, weights
from tests.headers import QWEN
from tests.test_estimate import SMOLLM2

ON_ONE = "runs on one node, and sglang and vllm on several: leave it out, or name one of them"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"engine": "llamacpp", "nodes": 2}, f"nodes: 2: llamacpp {ON_ONE}"),
        ({"engine": "llamacpp", "pipeline_parallel": 2}, f"pipeline_parallel: 2: llamacpp {ON_ONE}"),
        (
            {"engine": "vllm", "nodes": 2, "gpus": 4, "pipeline_parallel": 3},
            "pipeline_parallel: 3 stages cannot share 8 devices (nodes times GPUs) equally",
        ),
        (
            {"pipeline_parallel": 2},
            "pipeline_parallel: 2 stages cannot share 1 device (nodes times GPUs) equally",
        ),
        ({"nodes": 0}, "nodes: Input should be greater than or equal to 1"),
        ({"nodes": True}, "nodes: a number is needed, not true or false"),
    ],
)
def test_what_cannot_be_spread_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read_request({"repo": "org/name", **given})
    assert caught.value.failure.detail == sentence


@pytest.mark.parametrize(("nodes", "gpus", "stages"), [(1, 0, 1), (2, 0, 2), (2, 8, 2), (2, 8, 16), (4, 1, 1)])
def test_what_can_be_spread(nodes: int, gpus: int, stages: int) -> None:
    assert spread_fault(Engine.VLLM, nodes, gpus, stages) == ""
    assert spread_fault(None, nodes, gpus, stages) == "", (
        "the engine may follow from the weights: the check looks again"
    )


def test_the_check_refuses_an_engine_that_the_weights_chose() -> None:
    request = JobRequest(repo="org/name", nodes=2)
    with pytest.raises(StepError, match="nodes: 2: llamacpp runs on one node"):
        examine(SMOLLM2, weights(), request, FleetState())


def gang(request: JobRequest) -> ModelSpec:
    return spec_of(
        "m",
        request,
        repo="hf:org/name@abc",
        engine=Engine.VLLM,
        weights=weights(),
        need=ShardNeed(memory=GIB),
        context_length=512,
    )


def test_a_request_and_its_spec_say_the_same() -> None:
    request = JobRequest(repo="org/name", name="m", engine=Engine.VLLM, nodes=4, gpus=2, pipeline_parallel=4)
    made = gang(request)
    assert (made.shards, made.pipeline_parallel) == (4, 4)
    again = request_of(made.model_copy(update={"request": None}))
    assert (again.nodes, again.pipeline_parallel) == (4, 4)
    assert updated(request, JobRequest(nodes=8)).nodes == 8
    with pytest.raises(RefusedError, match="4 stages cannot share 2 devices"):
        updated(request, JobRequest(nodes=1))


@pytest.mark.parametrize("change", [{"nodes": 2}, {"pipeline_parallel": 2}])
def test_another_spread_is_another_version(change: dict[str, Any]) -> None:
    state, _ = apply(FleetState(), gang(JobRequest(repo="org/name", nodes=4)), 1.0)
    _, applied = apply(state, gang(JobRequest.model_validate({"repo": "org/name", "nodes": 4, **change})), 2.0)
    assert (applied.spec_version, applied.restarts) == (2, True)


def test_each_shard_needs_its_part() -> None:
    shape = shape_from_config(QWEN, GIB)
    whole, half = (
        estimate(shape, Engine.VLLM, context_length=4096, concurrency=4, gpus=1, nodes=nodes) for nodes in (1, 2)
    )
    assert isinstance(whole, Estimate)
    assert isinstance(half, Estimate)
    assert (half.weights * 2, half.kv_cache * 2) == (whole.weights, whole.kv_cache)


@pytest.mark.parametrize(
    ("shards", "verdict", "sentence"),
    [
        (2, FitVerdict.FITS, "big needs 12 GiB on each of 2 nodes; fits 2 of 3 nodes"),
        (
            3,
            FitVerdict.DOES_NOT_FIT,
            "big needs 12 GiB on each of 3 nodes, 2 of the 3 nodes that offer vllm could take a shard",
        ),
    ],
)
def test_a_gang_fits_where_enough_nodes_could_take_a_shard(shards: int, verdict: FitVerdict, sentence: str) -> None:
    offers = (EngineOffer(engine=Engine.VLLM, version="1", installed=True),)
    nodes = {
        name: inventory(memory=memory * GIB, engines=offers) for name, memory in (("n1", 16), ("n2", 16), ("n3", 8))
    }
    found = judge(fleet(nodes), "big", Engine.VLLM, ShardNeed(memory=12 * GIB), shards)
    assert (found.verdict, found.sentence) == (verdict, sentence)


# -- what the engines are told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
@pytest.mark.parametrize(
    ("gpus", "nodes", "stages", "tensor"), [(0, 2, 1, "2"), (0, 2, 2, "1"), (8, 2, 2, "8"), (2, 4, 1, "8")]
)
def test_layers_are_split_over_what_the_stages_leave(
    engine: Engine, gpus: int, nodes: int, stages: int, tensor: str
) -> None:
    command = ADAPTERS[engine].command(
        Path("/python"),
        Launch(
            host="10.0.0.2",
            port=21000,
            weights=Path("/w"),
            entry="",
            weights_size=GIB,
            alias="m",
            context_length=512,
            concurrency=2,
            memory=4 * GIB,
            gpus=tuple(f"GPU-{number}" for number in range(gpus)),
            gpu_total=80 * GIB,
            gpu_free=80 * GIB,
            pipeline=stages,
            gang=Gang(nodes=nodes, rank=1, address="10.0.0.1", port=21001, timeout_s=600),
        ),
    )
    given = dict(pairwise(command))
    assert given["--tensor-parallel-size"] == tensor
    assert given.get("--pipeline-parallel-size", "1") == str(stages)
    assert (given["--nnodes"], given["--node-rank"]) == (str(nodes), "1")


# -- causes -----------------------------------------------------------------------------------------------------------


def said(reason: Reason, node: str) -> Failure:
    return Failure(reason=reason, detail=reason.value, node=node)


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ([said(Reason.EXITED, "n1"), said(Reason.OUT_OF_MEMORY, "n2")], "n2"),
        ([said(Reason.RENDEZVOUS, "n1"), said(Reason.BAD_FLAG, "n2"), said(Reason.MEMORY, "n3")], "n2"),
        ([said(Reason.EXITED, "n2"), said(Reason.ENGINE_GONE, "n1")], "n2"),
        ([said(Reason.NEVER_READY, "n1")], "n1"),
    ],
)
def test_the_cause_is_no_echo_where_one_is_told(told: list[Failure], cause: str) -> None:
    assert first_cause(told).node == cause


def test_what_is_stored_without_a_spread_has_none() -> None:
    old = spec().model_dump(exclude={"shards", "pipeline_parallel"})
    assert ModelSpec.model_validate(old).shards == 1
    assert spec().weights.format is Format.GGUF

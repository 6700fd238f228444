"""What a spec may hand to an engine, on its whole way: typed, looked up, checked, placed, started."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from temporalio.testing import ActivityEnvironment

from activities.contract import ResolveRequest
from activities.node_contract import ShardRef
from activities.place import pass_plan
from activities.registry import Registry
from agent.engines import ADAPTERS
from agent.layout import Layout
from agent.probe import Probe
from agent.supervisor import Supervisor
from fleet.check import examine
from fleet.explain import explain
from fleet.inputs import input_sentence
from fleet.placement import place
from fleet.planning import plan
from fleet.reasons import Reason, StepError
from fleet.repos import choose_files, weights_id
from fleet.room import room_of
from fleet.shape_config import shape_from_config
from fleet.spec import Engine, JobRequest, ModelFile, ResolvedModel
from fleet.state import EngineOffer, FleetState
from runtime.config import HubConfig
from tests.fake_engines.node import FakeNode
from tests.fleets import fleet, inventory, spec
from tests.headers import QWEN
from tests.test_check import mirrored
from tests.test_engines import LAUNCH
from tests.waiting import until

# -- typed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["x"] * 129, "args: Tuple should have at most 128 items after validation, not 129"),
        (["--x", ""], "args.1: String should have at least 1 character"),
        (["x" * 4097], "args.0: String should have at most 4096 characters"),
        ("--x", "args: Input should be a valid tuple"),
        ([1], "args.0: Input should be a valid string"),
        (["\ud800"], "args.0: Input should be a valid string"),
    ],
)
def test_too_much_is_refused_as_it_is_typed(args: object, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate({"repo": "a/b", "args": args})
    assert input_sentence(caught.value).startswith(says)


# -- looked up --------------------------------------------------------------------------------------------------------


async def resolve(request: ResolveRequest) -> ResolvedModel:
    registry = Registry(HubConfig(endpoint="http://127.0.0.1:9"))
    found: ResolvedModel = await ActivityEnvironment().run(registry.resolve_model, request)
    return found


@pytest.mark.parametrize(
    ("request_", "reason", "says"),
    [
        (
            ResolveRequest(repo="org/m", engine=Engine.VLLM, args=("--seed=1", "--port=1")),
            Reason.BAD_FLAG,
            "vllm does not take the argument '--port': the node's agent.yaml says where its engines listen",
        ),
        (
            ResolveRequest(repo="org/m", engine=Engine.VLLM, args=("--trust-remote-code",)),
            Reason.BAD_FLAG,
            "the node and the model's `trust_remote_code` must both allow it",
        ),
        (
            ResolveRequest(repo="org/m", engine=Engine.LLAMACPP, trust_remote_code=True),
            Reason.BAD_INPUT,
            "trust_remote_code: llamacpp runs no code of a model: leave it out",
        ),
        (ResolveRequest(repo="file:GGUF", args=("n_ctx=1",)), Reason.BAD_FLAG, "say `context_length`"),
        (ResolveRequest(repo="file:GGUF", trust_remote_code=True), Reason.BAD_INPUT, "runs no code of a model"),
    ],
)
async def test_a_wish_no_node_would_grant_ends_before_a_byte_moves(
    tmp_path: Path, request_: ResolveRequest, reason: Reason, says: str
) -> None:
    """The hub of this test cannot be reached: where the engine is named, it is not asked."""
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(StepError) as caught:
        await resolve(request_.model_copy(update={"repo": request_.repo.replace("GGUF", str(model))}))
    assert caught.value.failure.reason is reason
    assert says in caught.value.failure.detail


def test_code_comes_along_where_it_is_trusted_and_into_a_directory_of_its_own() -> None:
    names = ("config.json", "model.safetensors", "modeling_x.py", "examples/run.py")
    files = [ModelFile(path=name, size=1) for name in names]
    plain, trusted = choose_files(files), choose_files(files, code=True)
    assert [file.path for file in plain.files] == ["config.json", "model.safetensors"]
    assert [file.path for file in trusted.files] == ["config.json", "model.safetensors", "modeling_x.py"]
    ids = {
        weights_id(ResolvedModel(repo="hf:o/n", revision="abc", format=one.format, entry=one.entry, files=one.files))
        for one in (plain, trusted)
    }
    assert len(ids) == 2


# -- checked ----------------------------------------------------------------------------------------------------------


def test_the_check_refuses_flags_and_leaves_a_trusted_architecture_to_its_code(tmp_path: Path) -> None:
    shape = shape_from_config({**QWEN, "architectures": ["OnlyInItsRepo"]}, 1000)
    weights = mirrored(tmp_path, {"model.safetensors": b"", "config.json": b"{}"})
    request = JobRequest(repo="a/b", engine=Engine.VLLM, trust_remote_code=True)
    assert examine(shape, weights, request, FleetState()).engine is Engine.VLLM
    for wrong, reason in (
        (request.model_copy(update={"trust_remote_code": False}), Reason.UNSUPPORTED_ARCHITECTURE),
        (request.model_copy(update={"args": ("--host=0.0.0.0",)}), Reason.BAD_FLAG),
    ):
        with pytest.raises(StepError) as caught:
            examine(shape, weights, wrong, FleetState())
        assert caught.value.failure.reason is reason


# -- placed -----------------------------------------------------------------------------------------------------------

VLLM = (EngineOffer(engine=Engine.VLLM, version="1", installed=True),)


def test_code_runs_only_where_the_node_allows_it() -> None:
    wanted = spec("m").model_copy(update={"engine": Engine.VLLM, "trust_remote_code": True})
    closed, open_ = inventory(engines=VLLM), inventory(engines=VLLM, trust_remote_code=True)
    state = fleet({"n1": closed, "n2": open_}, wanted)
    decision = place(wanted, "m-0", room_of(state))
    assert [shard.node for shard in decision.shards] == ["n2"]
    assert [verdict.reason for verdict in decision.verdicts] == [Reason.REMOTE_CODE, None]
    start = pass_plan(state, plan(state, 3.0)).starts["m-0"]
    assert start.shards[0].trust_remote_code

    nowhere = fleet({"n1": closed}, wanted)
    explained = explain(nowhere, nowhere.models["m"])
    assert explained.now.sentence == "0/1 nodes fit m: 1 remote_code"
    assert [way.sentence for way in explained.ways] == ["allow trust_remote_code in n1's agent.yaml"]
    assert place(wanted.model_copy(update={"trust_remote_code": False}), "m-0", room_of(nowhere)).shards


# -- started ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_the_engine_is_told_only_where_both_allow_it(engine: Engine) -> None:
    for trusted in (False, True):
        launch = replace(LAUNCH, args=(), trust_remote_code=trusted)
        assert ("--trust-remote-code" in ADAPTERS[engine].command(Path("p"), launch)) is trusted


@pytest.mark.parametrize(
    ("change", "allowed", "reason"),
    [
        ({"args": ("port=1",)}, True, Reason.BAD_FLAG),
        ({"args": ("n_batch=\0",)}, True, Reason.BAD_FLAG),
        ({"engine": Engine.VLLM, "args": ("--ho=0.0.0.0",)}, True, Reason.BAD_FLAG),
        ({"engine": Engine.VLLM, "trust_remote_code": True, "args": ()}, False, Reason.REMOTE_CODE),
        ({"engine": Engine.VLLM, "trust_remote_code": True, "args": ()}, True, None),
    ],
)
async def test_the_node_looks_for_itself(
    tmp_path: Path, change: dict[str, object], allowed: bool, reason: Reason | None
) -> None:
    async with Probe() as probe:
        node = FakeNode(tmp_path, probe, settings={"trust_remote_code": allowed})
        request = node.request("n_batch=1").model_copy(update=change)
        if reason is None:
            node.starter.check_wish(request)
            return
        with pytest.raises(StepError) as caught:
            node.starter.check_wish(request)
    assert caught.value.failure.reason is reason


async def test_hostile_values_arrive_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = [
        f"--x=$(touch {mark})",
        f"`touch {mark}`",
        f"; touch {mark} #",
        f"| touch {mark} &",
        f"--x=a\ntouch {mark}\n",
        "--x=%s{}\\$HOME~*?",
        "--x=\x1b[2J'\"\t\r",
        "--x=" + "y" * 4092,
    ]
    out = tmp_path / "arguments.json"
    code = f"import json, sys; open({str(out)!r}, 'w').write(json.dumps(sys.argv[1:]))"
    supervisor = Supervisor(Layout(tmp_path))
    stem = supervisor.next_stem(ShardRef(replica="m-0", generation=1))
    process = await supervisor.launch(stem, [sys.executable, "-c", code, *hostile], {})
    try:
        await until(lambda: supervisor.ended(process), 30)
    finally:
        await supervisor.stop(process, 0)
    assert json.loads(await asyncio.to_thread(out.read_text)) == hostile
    assert not mark.exists()

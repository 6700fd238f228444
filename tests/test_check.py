"""The check: real header bytes in a mirror against a fleet's snapshot, and the query against a real server."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import ByteSize
from temporalio import workflow
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.check import Check, mirrored_shape
from activities.contract import (
    QUERY_SNAPSHOT,
    CheckRequest,
    CheckResult,
    Snapshot,
    fleet_id,
)
from fleet.check import examine, refusal
from fleet.facts import node_joined
from fleet.fit import FitVerdict
from fleet.reasons import Reason, StepError
from fleet.render import size
from fleet.spec import Engine, Format, JobRequest, ModelFile, Weights
from fleet.state import FleetState
from runtime.config import HubConfig, MirrorConfig
from tests.fleets import inventory
from tests.ggufs import LLAMA, gguf
from tests.headers import QWEN, TENSOR, safetensors
from tests.test_fit import OFFER

MIB = 1024**2
GIB = 1024**3


@workflow.defn(name="SnapshotStub", sandboxed=False)
class SnapshotStub:
    """Answers the one query the check asks."""

    @workflow.init
    def __init__(self, state: FleetState) -> None:
        self._state = state

    @workflow.run
    async def run(self, state: FleetState) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query(name=QUERY_SNAPSHOT)
    def snapshot(self) -> Snapshot:
        return Snapshot(state=self._state)


def mirrored(directory: Path, files: dict[str, bytes], entry: str = "") -> Weights:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return Weights(
        model_id="m-1",
        format=Format.GGUF if entry else Format.SAFETENSORS,
        entry=entry,
        files=tuple(ModelFile(path=name, size=len(data), sha256="00") for name, data in files.items()),
        mirror=directory.as_uri(),
    )


def small_fleet(memory: int = 16 * GIB) -> FleetState:
    offers = (*OFFER, OFFER[0].model_copy(update={"engine": Engine.VLLM}))
    return node_joined(FleetState(), "n1", "i", inventory(memory=memory, engines=offers), 0.0)


def checked(weights: Weights, state: FleetState, **request: object) -> CheckResult:
    wish = JobRequest.model_validate({"repo": "file:/x/big.gguf", **request})
    result = examine(mirrored_shape(weights), weights, wish, state)
    refused = refusal(result)
    if refused is not None:
        raise refused
    return result


def why_not(weights: Weights, state: FleetState, **request: object) -> tuple[Reason, str]:
    with pytest.raises(StepError) as caught:
        checked(weights, state, **request)
    return caught.value.failure.reason, caught.value.failure.detail


@pytest.fixture
def model(tmp_path: Path) -> Weights:
    return mirrored(tmp_path / "a dir", {"m.gguf": gguf()}, "m.gguf")


def test_gguf_that_fits(model: Weights) -> None:
    result = checked(model, small_fleet())
    assert (result.verdict, result.engine, result.architecture) == (FitVerdict.FITS, Engine.LLAMACPP, "llama")
    assert (result.context_length, result.candidate) == (4096, "n1")
    assert result.estimate is not None
    assert result.need.memory == result.estimate.total
    assert result.need.disk == model.size
    assert result.sentence.startswith(f"big needs {size(result.need.memory)}; fits n1 (weights ")


def test_operators_numbers_replace_the_estimate(model: Weights) -> None:
    result = checked(model, small_fleet(), memory="12GiB", gpus=0, context_length=300, name="mine")
    assert (result.estimate, result.need.memory, result.context_length) == (None, 12 * GIB, 300)
    assert result.sentence == "mine needs 12 GiB; fits n1 (as the operator said)"


def test_too_large_for_any_node(model: Weights) -> None:
    assert why_not(model, small_fleet(23 * GIB + 410 * MIB), memory=ByteSize(300 * GIB)) == (
        Reason.DOES_NOT_FIT,
        "big needs 300 GiB for one shard, the largest node n1 has 23.4 GiB",
    )


def test_without_a_node_nothing_is_promised(model: Weights) -> None:
    result = checked(model, FleetState())
    assert (result.verdict, result.candidate) == (FitVerdict.UNKNOWN, "")
    assert result.sentence.startswith(f"no node has joined yet; big needs {size(result.need.memory)} (")


def test_header_that_leaves_out_the_heads(tmp_path: Path) -> None:
    metadata = {key: value for key, value in LLAMA.items() if "head_count" not in key}
    weights = mirrored(tmp_path / "m", {"m.gguf": gguf(metadata)}, "m.gguf")
    reason, detail = why_not(weights, small_fleet())
    assert reason is Reason.FIT_UNKNOWN
    assert "its weights lack the number of KV heads" in detail
    assert checked(weights, small_fleet(), memory=GIB).verdict is FitVerdict.FITS


@pytest.mark.parametrize(
    ("data", "reason", "says"),
    [
        (gguf(missing=1), Reason.WEIGHTS_UNREADABLE, "m.gguf is truncated: its header says"),
        (b"<html>", Reason.WEIGHTS_UNREADABLE, "m.gguf is not a GGUF file"),
        (gguf(tensors=()), Reason.WEIGHTS_UNREADABLE, "m.gguf holds no tensors"),
        (gguf({**LLAMA, "general.type": "adapter"}), Reason.UNSUPPORTED_ARCHITECTURE, "is of type adapter"),
        (
            gguf({**LLAMA, "general.architecture": "clip"}),
            Reason.UNSUPPORTED_ARCHITECTURE,
            "llamacpp does not load the architecture 'clip'",
        ),
        (gguf({}), Reason.UNSUPPORTED_ARCHITECTURE, "'(none is named)'"),
    ],
)
def test_weights_that_cannot_be_served(tmp_path: Path, data: bytes, reason: Reason, says: str) -> None:
    found, detail = why_not(mirrored(tmp_path / "m", {"m.gguf": data}, "m.gguf"), small_fleet())
    assert found is reason
    assert says in detail


def test_second_shard_is_read_too(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    whole = mirrored(tmp_path / "m", {names[0]: gguf(tensors=()), names[1]: gguf({})}, names[0])
    assert checked(whole, small_fleet()).verdict is FitVerdict.FITS
    short = mirrored(tmp_path / "m", {names[0]: gguf(), names[1]: gguf({}, missing=9)}, names[0])
    assert f"{names[1]} is truncated" in why_not(short, small_fleet())[1]


def test_file_gone_from_the_mirror(model: Weights, tmp_path: Path) -> None:
    (tmp_path / "a dir" / "m.gguf").unlink()
    assert why_not(model, small_fleet())[0] is Reason.WEIGHTS_MISSING


def test_engine_that_reads_another_format(model: Weights) -> None:
    assert why_not(model, small_fleet(), engine="vllm") == (
        Reason.UNSUPPORTED_ARCHITECTURE,
        "vllm reads safetensors weights, these are gguf",
    )


def test_longer_context_than_the_model_has(model: Weights) -> None:
    reason, detail = why_not(model, small_fleet(), context_length=8193)
    assert (reason, "context_length: 8193 is more than the 8192" in detail) == (Reason.BAD_INPUT, True)


def test_safetensors(tmp_path: Path) -> None:
    files = {"config.json": json.dumps(QWEN).encode(), "model.safetensors": safetensors(TENSOR, 16)}
    result = checked(mirrored(tmp_path / "m", files), small_fleet())
    assert (result.engine, result.architecture, result.candidate) == (Engine.VLLM, "Qwen2ForCausalLM", "n1")
    assert result.estimate is not None
    assert result.estimate.weights == 8, "four numbers, computed in two bytes each"
    short = {**files, "model.safetensors": files["model.safetensors"][:-1]}
    assert why_not(mirrored(tmp_path / "s", short), small_fleet())[0] is Reason.WEIGHTS_UNREADABLE
    bad = {**files, "config.json": b"[]"}
    assert why_not(mirrored(tmp_path / "b", bad), small_fleet())[1] == "config.json is not a JSON object"


async def test_asks_the_fleet(model: Weights, client: Client) -> None:
    """On a real server: before Fleet runs there is no node; then its snapshot decides."""
    cell = f"check-{uuid4().hex[:8]}"
    check = Check(client, MirrorConfig(path=Path("/nowhere")), HubConfig())
    request = CheckRequest(cell=cell, weights=model, request=JobRequest(repo="file:/x/big.gguf"))
    before: CheckResult = await ActivityEnvironment().run(check.check_fit, request)
    assert before.verdict is FitVerdict.UNKNOWN
    async with Worker(client, task_queue=cell, workflows=[SnapshotStub]):
        handle = await client.start_workflow("SnapshotStub", small_fleet(), id=fleet_id(cell), task_queue=cell)
        after: CheckResult = await ActivityEnvironment().run(check.check_fit, request)
        await handle.terminate()
    assert (after.verdict, after.candidate) == (FitVerdict.FITS, "n1")

"""The check alone, on a real server with the real activities: from ctl, from Temporal, off a hub, and on paper."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pydantic import ByteSize, ValidationError
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.check import Check
from activities.contract import CONTROL_QUEUE, MODEL_CHECK_WORKFLOW, CheckRepoRequest, CheckReport, ResolveRequest
from activities.registry import Registry
from fleet.fit import FitVerdict
from fleet.paper import CheckWish, Paper, fleet_of, read_gpus
from fleet.reasons import Reason
from fleet.spec import Engine
from runtime.config import HubConfig, MirrorConfig
from tests.ctl import Ctl, ctl_environment
from tests.ggufs import LLAMA, gguf
from tests.headers import QWEN, safetensors
from tests.stub_hub import Hub, stub_hub
from workflows.model_check import ModelCheck

GIB = 1024**3
WEIGHTS = 140 * GIB
"""Of a model of seventy billion parameters, of which no byte is there."""

BIG = {**QWEN, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80}


def sparse(path: Path, config: dict[str, object] = BIG, size: int = WEIGHTS) -> Path:
    """A checkpoint whose one file is a header and a hole."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    entries = {"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    file = path / "model.safetensors"
    file.write_bytes(safetensors(entries, 0))
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + size)
    return path


class Desk:
    """A worker with what a check needs, and nothing else."""

    def __init__(self, client: Client, queue: str) -> None:
        self._client = client
        self._queue = queue

    async def check(self, *inputs: Any) -> CheckReport:
        report: CheckReport = await self._client.execute_workflow(
            MODEL_CHECK_WORKFLOW,
            args=list(inputs),
            id=f"check/{uuid4().hex[:8]}",
            task_queue=self._queue,
            result_type=CheckReport,
        )
        return report

    async def why_not(self, *inputs: Any) -> tuple[str | None, str]:
        with pytest.raises(WorkflowFailureError) as caught:
            await self.check(*inputs)
        assert isinstance(caught.value.cause, ApplicationError)
        return caught.value.cause.type, caught.value.cause.message


@pytest.fixture
def hub() -> Any:
    tensors = {"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}
    files = {
        "config.json": json.dumps(QWEN).encode(),
        "model-00001-of-00002.safetensors": safetensors(tensors, 8),
        "model-00002-of-00002.safetensors": safetensors(tensors, 8),
    }
    with stub_hub(files) as served:
        yield served


@pytest.fixture
async def desk(client: Client, hub: Hub, tmp_path: Path) -> AsyncIterator[Desk]:
    config = HubConfig(endpoint=hub.url)
    check = Check(client, MirrorConfig(path=tmp_path / "mirror", keep_free=ByteSize(0)), config)
    queue = f"desk-{uuid4().hex[:8]}"
    activities: list[Any] = [Registry(config).resolve_model, check.check_repo]
    async with Worker(client, task_queue=queue, workflows=[ModelCheck], activities=activities):
        yield Desk(client, queue)


async def test_many_checks_at_once_do_not_wait_for_each_others_threads(client: Client, tmp_path: Path) -> None:
    """More than the event loop has threads: each waits for reads, which want such a thread too."""
    repo, config = f"file:{sparse(tmp_path / 'big-70b')}", HubConfig()
    found = await ActivityEnvironment().run(Registry(config).resolve_model, ResolveRequest(repo=repo))
    check = Check(client, MirrorConfig(path=tmp_path / "mirror"), config)
    wish = CheckWish.model_validate({"repo": repo, "paper": {"gpus": "8x80GiB"}})
    request = CheckRepoRequest(resolved=found, wish=wish)
    results = await asyncio.wait_for(
        asyncio.gather(*(ActivityEnvironment().run(check.check_repo, request) for _ in range(40))), 60
    )
    assert {result.verdict for result in results} == {FitVerdict.FITS}


async def test_on_paper_the_smallest_number_of_gpus_is_found(desk: Desk, tmp_path: Path) -> None:
    repo = f"file:{sparse(tmp_path / 'big-70b')}"
    report = await desk.check({"repo": repo, "paper": {"gpus": "8x80GiB"}})
    found = report.check
    assert (found.verdict, found.engine, found.need.gpus, found.nodes) == (FitVerdict.FITS, Engine.VLLM, 2, 1)
    assert found.estimate is not None
    assert found.estimate.weights == WEIGHTS // 2
    assert found.estimate.kv_cache == 80 * 4 * 2 * 128 * 2 * 4096 * 4, "four of eight heads on each GPU"
    assert report.sentence.startswith("big-70b needs 2 GPUs with ")
    assert not (tmp_path / "mirror").exists(), "nothing is brought"

    over = await desk.check({"repo": repo, "paper": {"gpus": "2x48GiB", "nodes": 2}})
    assert (over.check.verdict, over.check.nodes, over.check.need.gpus) == (FitVerdict.FITS, 2, 2)
    assert over.sentence.startswith("big-70b needs 2 GPUs with ")
    assert " each on each of 2 nodes; fits 2 of 2 nodes (" in over.sentence

    small = await desk.check({"repo": repo, "paper": {"gpus": "1x24GiB", "ram": "64GiB"}})
    assert (small.check.verdict, small.check.reason) == (FitVerdict.DOES_NOT_FIT, Reason.DOES_NOT_FIT)
    assert "the largest node paper has 24 GiB" in small.sentence

    asked = await desk.check({"repo": repo, "paper": {"gpus": "4x48GiB"}, "gpus": 2})
    assert asked.check.reason is Reason.DOES_NOT_FIT
    assert asked.check.parallelism is not None
    assert asked.check.parallelism.gpus == 4
    assert "; it fits on 4 GPUs with " in asked.sentence


async def test_a_hub_is_asked_for_headers_alone(desk: Desk, hub: Hub) -> None:
    report = await desk.check({"repo": hub.repo, "paper": {"ram": "64GiB"}})
    assert (report.check.verdict, report.check.architecture) == (FitVerdict.FITS, "Qwen2ForCausalLM")
    assert report.check.estimate is not None
    assert report.check.estimate.weights == 16
    assert all("range" in asked for asked in hub.asked("safetensors")), "in ranges"


async def test_a_fleet_without_nodes_promises_nothing(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf())
    report = await desk.check({"repo": f"file:{tmp_path}/m.gguf", "cell": f"c{uuid4().hex[:6]}"})
    assert (report.check.verdict, report.check.reason, report.preflight) == (FitVerdict.UNKNOWN, None, None)
    assert report.sentence.startswith("no node has joined yet; m needs ")


async def test_what_cannot_be_told_is_unknown(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf({key: value for key, value in LLAMA.items() if "head" not in key}))
    report = await desk.check({"repo": f"file:{tmp_path}/m.gguf", "paper": {"ram": "1GiB"}})
    assert (report.check.verdict, report.check.reason, report.check.need.memory) == (
        FitVerdict.UNKNOWN,
        Reason.FIT_UNKNOWN,
        0,
    )
    assert report.check.missing == ("number of KV heads",)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ((), "input: a ModelCheck takes one input, not 0"),
        ((None,), "repo: Field required"),
        (({"repo": "a/b"}, 2), "input: a ModelCheck takes one input, not 2"),
        (({"repo": "a/b", "gpu": 1},), "gpu: Extra inputs are not permitted"),
        (({"repo": "a/b", "paper": {"gpus": "2x"}},), "paper.gpus: '2x' is not a number of GPUs and their memory"),
        (({"repo": "no such thing"},), "repo 'no such thing' is no repo"),
    ],
)
async def test_wrong_inputs_are_answers(desk: Desk, inputs: tuple[Any, ...], says: str) -> None:
    reason, sentence = await desk.why_not(*inputs)
    assert reason == "bad_input"
    assert says in sentence


async def test_what_the_repo_or_engine_refuses_ends_the_check(desk: Desk, hub: Hub, tmp_path: Path) -> None:
    assert (await desk.why_not({"repo": "org/absent"}))[0] == "repo_not_found"
    (tmp_path / "m.gguf").write_bytes(gguf(missing=1))
    assert (await desk.why_not({"repo": f"file:{tmp_path}/m.gguf"}))[0] == "weights_unreadable"
    assert (await desk.why_not({"repo": hub.repo, "args": ["--port=1"]}))[0] == "bad_flag"


async def test_ctl_model_check(desk: Desk, client: Client, hub: Hub, tmp_path: Path) -> None:
    """As a person runs it: a table, JSON, and an exit code that a script can use."""
    big = sparse(tmp_path / "big")
    check = Check(client, MirrorConfig(path=tmp_path / "mirror"), HubConfig(endpoint=hub.url))
    ctl = Ctl(ctl_environment(tmp_path / "home", client.service_client.config.target_host))
    activities: list[Any] = [Registry(HubConfig(endpoint=hub.url)).resolve_model, check.check_repo]
    async with Worker(client, task_queue=CONTROL_QUEUE, workflows=[ModelCheck], activities=activities):
        code, out, err = await ctl.run("model", "check", str(big), "--gpus", "2x80GiB")
        assert (code, err) == (0, "")
        assert [line.split("  ")[0] for line in out.splitlines()[2:7]] == [
            *("weights", "KV cache", "overhead", "estimate", "need")
        ]
        assert out.splitlines()[-1].startswith("fits: big needs 2 GPUs with ")
        code, out, _ = await ctl.run("model", "check", str(big), "--gpus", "1x24GiB", "--json")
        report = CheckReport.model_validate_json(out)
        assert (code, report.check.verdict) == (1, FitVerdict.DOES_NOT_FIT)
        code, _, err = await ctl.run("model", "check", str(big), "--gpus", "1x24")
        assert code == 2
        assert "name the unit" in err.replace("\n", " ")


# -- paper ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("2x80GiB", (80 * GIB,) * 2),
        ("1x24GiB,2x80GiB", (24 * GIB, 80 * GIB, 80 * GIB)),
        (" 1 x 24GiB , 1x16GB ", (24 * GIB, 16 * 10**9)),
    ],
)
def test_gpus_on_paper(text: str, gpus: tuple[int, ...]) -> None:
    assert read_gpus(text) == gpus
    nodes = fleet_of(Paper(gpus=text, nodes=2)).nodes
    assert set(nodes) == {"paper1", "paper2"}
    assert [device.total for device in nodes["paper1"].inventory.devices if device.uuid != "cpu"] == list(gpus)


@pytest.mark.parametrize("text", ["80GiB", "2x", "x80GiB", "0x80GiB", "2x-80GiB", "99x80GiB", "2x80", "2x80GiB,,"])
def test_what_is_no_gpu_on_paper(text: str) -> None:
    with pytest.raises(ValidationError):
        CheckWish.model_validate({"repo": "a/b", "paper": {"gpus": text}})

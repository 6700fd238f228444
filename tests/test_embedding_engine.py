"""A real llama.cpp embeds and ranks, started with what its tasks need, and the job's smoke test asks it.

The same flags of vLLM and SGLang are held as a table in tests/test_smoke.py: a vLLM takes a minute to start, and
SGLang has no build for a machine without GPUs.
"""

import os
from pathlib import Path

import httpx
import pytest
from temporalio.testing import ActivityEnvironment

from activities.contract import SmokeRequest, SmokeResult
from activities.smoke import Smoke
from fleet.spec import Engine, Format, Task
from fleet.tasks import task_arguments, task_of
from runtime.engine_keys import EngineKeys
from tests.bert_gguf import EMBEDDING, make
from tests.real_engine import ENGINE
from tests.test_memory_truth import estimated, serving, weights_in


@pytest.mark.parametrize(
    ("task", "says"),
    [(Task.EMBED, f"an embedding of {EMBEDDING} numbers"), (Task.RERANK, "a ranking of 2 documents")],
)
async def test_llamacpp_does_what_the_task_asks(real_engine: None, tmp_path: Path, task: Task, says: str) -> None:
    (tmp_path / "m").mkdir()
    make(tmp_path / "m" / "m.gguf", ranks=task is Task.RERANK)
    weights = weights_in(tmp_path / "m", Format.GGUF, "m.gguf")
    args = task_arguments(Engine.LLAMACPP, task)
    memory = estimated(weights, Engine.LLAMACPP).total
    python = Path(os.environ[ENGINE])
    async with serving(Engine.LLAMACPP, python, weights, memory, args, tmp_path / "log", 30.0) as (_, url):
        request = SmokeRequest(endpoint=url, model="m", task=task)
        result: SmokeResult = await ActivityEnvironment().run(Smoke(EngineKeys(None)).smoke_test, request)
        assert (result.answer, result.task, result.served_as) == (says, task, "m")
        assert result.completion_tokens > 5
        if task is Task.EMBED:
            near, same, far = [await embedded(url, text) for text in ("a capital", "a capital", "bread")]
            assert near == same != far


def test_the_header_says_what_it_is_for() -> None:
    assert task_of("bert") is Task.EMBED, "one that ranks has the same architecture: `--task rerank` says so"


async def embedded(url: str, text: str) -> list[float]:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{url}/v1/embeddings", json={"model": "m", "input": text})
    numbers: list[float] = answer.json()["data"][0]["embedding"]
    return numbers

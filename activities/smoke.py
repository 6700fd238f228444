"""The job's last step: one real request to a serving replica, as fits what the model is for, and how fast it came."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from temporalio import activity

from activities.contract import SMOKE_TEST, SmokeRequest, SmokeResult
from activities.streamed import joined
from fleet.reasons import Reason, StepError
from fleet.spec import Task
from runtime.engine_keys import EngineAuth, EngineKeys

TIMEOUT_S = 60.0
"""48 tokens take 10 s on the slowest machine tried (5 tokens/s): a minute of silence is no service."""
MAX_TOKENS = 48
DOCUMENTS = ("Paris is the capital of France.", "Bread is made of flour and water.")
"""For a model that ranks."""
SHOWN = 200
"""Characters of the engine's own error in ours."""


class Smoke:
    """Asks a replica one question."""

    def __init__(self, keys: EngineKeys, timeout_s: float = TIMEOUT_S) -> None:
        self._auth = EngineAuth(keys)
        self._timeout_s = timeout_s

    @activity.defn(name=SMOKE_TEST)
    async def smoke_test(self, request: SmokeRequest) -> SmokeResult:
        """Raises StepError(SMOKE_TEST_FAILED) with the status and the start of the body."""
        path, body = _question(request)
        url = f"{request.endpoint.rstrip('/')}{path}"
        started, asked_ns = time.monotonic(), time.time_ns()
        try:
            # The deadline is on the whole answer: the client's own would start again with each byte.
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(timeout=None, trust_env=False, auth=self._auth) as client,  # noqa: S113
                client.stream("POST", url, json=body) as response,
            ):
                came = await joined(response)
        except TimeoutError as error:
            raise _failed(request, f"did not answer within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _failed(request, f"could not be asked: {error or type(error).__name__}") from error
        seconds = time.monotonic() - started
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise _failed(request, "asks for a key the worker does not have: see engine_key_file in server.yaml")
        if response.status_code != 200:
            raise _failed(request, f"answered {response.status_code}: {_start(came.body)}")
        try:
            answer = json.loads(came.body)
            text, counted = _READ[request.task](answer)
            usage = answer.get("usage")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            what = _WANTED[request.task]
            raise _failed(request, f"answered 200 with something else than {what}: {_start(came.body)}") from error
        if not text:
            raise _failed(request, f"answered 200 with an empty text: {_start(came.body)}")
        count = _count(usage, counted)
        return SmokeResult(
            answer=text,
            seconds=seconds,
            completion_tokens=count,
            tokens_per_second=count / max(seconds, 1e-6),
            task=request.task,
            prompt_tokens=_count(usage, "prompt_tokens"),
            served_as=str(answer.get("model") or ""),
            first_token_ns=came.first_ns,
            first_token_s=max(0, came.first_ns - asked_ns) / 1e9,
        )


def _count(usage: object, name: str) -> int:
    tokens = usage.get(name) if isinstance(usage, Mapping) else 0
    return tokens if isinstance(tokens, int) else 0


def _question(request: SmokeRequest) -> tuple[str, dict[str, Any]]:
    """The path and the body of the request."""
    match request.task:
        case Task.EMBED:
            return "/v1/embeddings", {"model": request.model, "input": request.prompt}
        case Task.RERANK:
            query = {"query": "What is the capital of France?", "documents": list(DOCUMENTS)}
            return "/v1/rerank", {"model": request.model, **query}
    return "/v1/chat/completions", {
        "model": request.model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,  # the trace has the moment of the first token
        "stream_options": {"include_usage": True},
    }


def _completion(answer: Any) -> tuple[str, str]:
    return str(answer["choices"][0]["message"]["content"] or "").strip(), "completion_tokens"


def _embedding(answer: Any) -> tuple[str, str]:
    numbers = [float(number) for number in answer["data"][0]["embedding"]]
    if not any(numbers) or not all(math.isfinite(number) for number in numbers):
        raise ValueError("no direction")
    return f"an embedding of {len(numbers)} numbers", "prompt_tokens"


def _ranking(answer: Any) -> tuple[str, str]:
    scores = {int(one["index"]): float(one["relevance_score"]) for one in answer["results"]}
    if set(scores) != set(range(len(DOCUMENTS))) or not all(math.isfinite(score) for score in scores.values()):
        raise ValueError("not each document has a score")
    return f"a ranking of {len(scores)} documents", "total_tokens"


_READ: Mapping[Task, Callable[[Any], tuple[str, str]]] = {
    Task.GENERATE: _completion,
    Task.EMBED: _embedding,
    Task.RERANK: _ranking,
}
"""What the answer says, and under which name it counts its tokens."""
_WANTED = {Task.GENERATE: "a completion", Task.EMBED: "an embedding", Task.RERANK: "a ranking of the documents"}


def _start(body: str) -> str:
    return " ".join(body[: 4 * SHOWN].split())[:SHOWN] or "(nothing)"


def _failed(request: SmokeRequest, what: str) -> StepError:
    return StepError(Reason.SMOKE_TEST_FAILED, f"{request.model} at {request.endpoint} {what}")

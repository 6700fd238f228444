"""The job's last step: one real completion from a serving replica, and how fast it came."""

import asyncio
import time
from collections.abc import Mapping

import httpx
from temporalio import activity

from activities.contract import SMOKE_TEST, SmokeRequest, SmokeResult
from fleet.reasons import Reason, StepError
from runtime.engine_keys import EngineAuth, EngineKeys

TIMEOUT_S = 60.0
"""48 tokens take 10 s on the slowest machine tried (5 tokens/s): a minute of silence is no service."""
MAX_TOKENS = 48
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
        url = f"{request.endpoint.rstrip('/')}/v1/chat/completions"
        body = {
            "model": request.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        started = time.monotonic()
        try:
            # The deadline is on the whole answer: the client's own would start again with each byte.
            async with (
                asyncio.timeout(self._timeout_s),
                httpx.AsyncClient(timeout=None, trust_env=False, auth=self._auth) as client,  # noqa: S113
            ):
                response = await client.post(url, json=body)
        except TimeoutError as error:
            raise _failed(request, f"did not answer within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise _failed(request, f"could not be asked: {error or type(error).__name__}") from error
        seconds = time.monotonic() - started
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise _failed(request, "asks for a key the worker does not have: see engine_key_file in server.yaml")
        if response.status_code != 200:
            raise _failed(request, f"answered {response.status_code}: {_start(response)}")
        try:
            answer = response.json()
            text = str(answer["choices"][0]["message"]["content"] or "").strip()
            usage = answer.get("usage")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _failed(request, f"answered 200 with something else than a completion: {_start(response)}") from error
        if not text:
            raise _failed(request, f"answered 200 with an empty text: {_start(response)}")
        tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else 0
        count = tokens if isinstance(tokens, int) else 0
        return SmokeResult(
            answer=text, seconds=seconds, completion_tokens=count, tokens_per_second=count / max(seconds, 1e-6)
        )


def _start(response: httpx.Response) -> str:
    return " ".join(response.text[: 4 * SHOWN].split())[:SHOWN] or "(nothing)"


def _failed(request: SmokeRequest, what: str) -> StepError:
    return StepError(Reason.SMOKE_TEST_FAILED, f"{request.model} at {request.endpoint} {what}")

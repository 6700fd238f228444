"""One request and its answer as OpenTelemetry's conventions name them: on its span and in the gateway's metrics."""

import json
import re
import time

from opentelemetry.trace import Span

from fleet.metrics import FIRST_BYTE, GEN_AI_REQUESTS, HTTP_REQUESTS, OTHER, TOKEN_USAGE
from runtime.instruments import histogram

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
"""`gen_ai.operation.name` by path; other paths are other things, such as a tokenizer's."""

USAGE = {"input": "gen_ai.usage.input_tokens", "output": "gen_ai.usage.output_tokens"}

TAIL = 4096
"""Bytes kept of an answer's end, and of its beginning: engines state usage last, and the model first or last."""
MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,256})"')

HTTP_TOOK = histogram(HTTP_REQUESTS)
MODEL_TOOK = histogram(GEN_AI_REQUESTS)
FIRST = histogram(FIRST_BYTE)
TOKENS = histogram(TOKEN_USAGE)


class Answer:
    """What passes by of an answer. Inside a JSON text quotes are escaped, so no prompt or answer can pose as usage."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        """On the monotonic clock."""
        self.streamed = False
        self.broke_off = False
        self._head = b""
        self._tail = b""

    def saw(self, chunk: bytes) -> None:
        """These bytes go to the client."""
        if self.first_at is None:
            self.first_at = time.monotonic()
        if len(self._head) < TAIL:
            self._head += chunk[: TAIL - len(self._head)]
        self._tail = (self._tail + chunk)[-TAIL:]

    def usage(self) -> dict[str, int]:
        """Tokens by `input` and `output`, where the engine states them."""
        at = self._tail.rfind(b'"usage"')
        start = self._tail.find(b"{", at)
        if at < 0 or start < 0:
            return {}
        try:
            stated, _ = json.JSONDecoder().raw_decode(self._tail[start:].decode("utf-8", errors="replace"))
        except ValueError:
            return {}
        named = {"input": ("prompt_tokens", "input_tokens"), "output": ("completion_tokens", "output_tokens")}
        found = {kind: next((stated[key] for key in keys if key in stated), None) for kind, keys in named.items()}
        return {kind: count for kind, count in found.items() if isinstance(count, int) and count >= 0}

    def model(self) -> str:
        """The model the engine says it is, or ""."""
        found = MODEL.search(self._tail) or MODEL.search(self._head)
        return found.group(1).decode("utf-8", errors="replace") if found is not None else ""


class Exchange:
    """A request under way. `model` is as the client wrote it; it is a label only once the catalog knows it."""

    def __init__(self, path: str, model: str) -> None:
        self.answer = Answer()
        self._began = time.monotonic()
        self._operation = OPERATIONS.get(path, OTHER)
        self._route = path if path in OPERATIONS else "/v1/{path}"
        self._asked = model
        self._model = OTHER

    def attributes(self, path: str) -> dict[str, str]:
        """Of its span, at the start."""
        known = {} if self._operation == OTHER else {"gen_ai.operation.name": self._operation}
        return {
            **known,
            "gen_ai.request.model": self._asked,
            "http.request.method": "POST",
            "http.route": self._route,
            "url.path": path,
        }

    def known(self, model: str) -> None:
        """The catalog has it, under this name."""
        self._model = model

    def ended(self, span: Span, status: int, error: str = "") -> None:
        """Say on the span how it ended, and count it. `error` is what failed, in a word; 0: the client left."""
        error = error or ("upstream_broke_off" if self.answer.broke_off else str(status) if status >= 500 else "")
        failed = {"error.type": error} if error else {}
        if status:
            span.set_attribute("http.response.status_code", status)
        span.set_attributes(failed)
        http: dict[str, str | int] = {"http.request.method": "POST", "http.route": self._route, **failed}
        took = time.monotonic() - self._began
        HTTP_TOOK.record(took, {**http, "http.response.status_code": status} if status else http)
        model = {"gen_ai.operation.name": self._operation, "gen_ai.request.model": self._model}
        MODEL_TOOK.record(took, {**model, **failed})
        if self.answer.first_at is None or status != 200:
            return
        if self.answer.streamed:
            FIRST.record(self.answer.first_at - self._began, model)
        for kind, count in self.answer.usage().items():
            span.set_attribute(USAGE[kind], count)
            TOKENS.record(count, {**model, "gen_ai.token.type": kind})
        if answered := self.answer.model():
            span.set_attribute("gen_ai.response.model", answered)

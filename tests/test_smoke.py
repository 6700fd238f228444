"""The smoke test against a real HTTP server that answers as engines do, and as broken ones do."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.contract import SmokeRequest, SmokeResult
from activities.smoke import Smoke
from fleet.reasons import Reason, StepError
from fleet.spec import Engine, Task
from fleet.tasks import task_arguments, task_of
from runtime.engine_keys import EngineKeys


def completion(text: object, **more: object) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], **more}).encode()


@contextmanager
def engine(
    status: int, body: bytes, asked: list[dict[str, Any]], hold: threading.Event | None = None, kind: str = ""
) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"path": self.path, **request})
            if hold is not None:
                hold.wait(30)
            self.send_response(status)
            if kind:
                self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


async def ask(endpoint: str, smoke: Smoke | None = None, task: Task = Task.GENERATE) -> SmokeResult:
    request = SmokeRequest(endpoint=endpoint, model="m", task=task)
    result: SmokeResult = await ActivityEnvironment().run((smoke or Smoke(EngineKeys())).smoke_test, request)
    return result


async def refusal(endpoint: str, smoke: Smoke | None = None, task: Task = Task.GENERATE) -> str:
    with pytest.raises(StepError) as caught:
        await ask(endpoint, smoke, task)
    assert caught.value.failure.reason is Reason.SMOKE_TEST_FAILED
    return caught.value.failure.detail


async def test_answer_and_speed() -> None:
    asked: list[dict[str, Any]] = []
    with engine(200, completion(" Paris. ", usage={"completion_tokens": 12}), asked) as endpoint:
        result = await ask(f"{endpoint}/")
    assert (result.answer, result.completion_tokens) == ("Paris.", 12)
    assert result.tokens_per_second == pytest.approx(12 / result.seconds)
    assert asked[0]["path"] == "/v1/chat/completions"
    assert (asked[0]["model"], asked[0]["max_tokens"], asked[0]["temperature"]) == ("m", 48, 0)


def stream(*chunks: object) -> bytes:
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


def delta(**said: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": said}]}


async def test_a_streamed_answer_is_joined_and_tells_when_its_first_token_came() -> None:
    before = time.time_ns()
    body = stream(
        delta(role="assistant", content=None),
        delta(content=" Pa"),
        delta(content="ris."),
        {"choices": [], "usage": {"completion_tokens": 2}},
    )
    asked: list[dict[str, Any]] = []
    with engine(200, body, asked, kind="text/event-stream; charset=utf-8") as endpoint:
        result = await ask(endpoint)
    assert (result.answer, result.completion_tokens) == ("Paris.", 2)
    assert before < result.first_token_ns < time.time_ns()
    assert 0 < result.first_token_s <= result.seconds
    assert (asked[0]["stream"], asked[0]["stream_options"]) == (True, {"include_usage": True})


async def test_what_other_texts_take_for_the_end_of_a_line_is_part_of_an_answer() -> None:
    said = "".join(map(chr, (0x50, 0x85, 0x2028, 0x2029, 0x51)))
    body = f"data: {json.dumps(delta(content=said), ensure_ascii=False)}\r\n\r\ndata: [DONE]".encode()
    with engine(200, body, [], kind="text/event-stream; charset=utf-8") as endpoint:
        assert (await ask(endpoint)).answer == said


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (stream({"error": {"message": "out of slots"}}), 'than a completion: {"error": {"message": "out of slots"}}'),
        (b"data: not json\n\n", "than a completion: not json"),
        (stream(), "than a completion: (nothing)"),
        (stream(delta(role="assistant")), "with an empty text"),
    ],
)
async def test_a_stream_that_is_no_completion_is_a_sentence(body: bytes, says: str) -> None:
    with engine(200, body, [], kind="text/event-stream") as endpoint:
        assert says in await refusal(endpoint)


async def test_answer_without_usage_still_counts() -> None:
    with engine(200, completion("Paris."), []) as endpoint:
        result = await ask(endpoint)
    assert (result.answer, result.completion_tokens, result.tokens_per_second) == ("Paris.", 0, 0.0)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, b'{"error": "Loading model"}', 'answered 503: {"error": "Loading model"}'),
        (500, b"x" * 5000, f"answered 500: {'x' * 200}"),
        (404, b"", "answered 404: (nothing)"),
        (200, b"<html>", "answered 200 with something else than a completion: <html>"),
        (200, b"[]", "something else than a completion"),
        (200, b'{"choices": []}', "something else than a completion"),
        (200, completion(""), "answered 200 with an empty text"),
        (200, completion(None), "answered 200 with an empty text"),
    ],
)
async def test_no_answer_is_a_sentence(status: int, body: bytes, says: str) -> None:
    with engine(status, body, []) as endpoint:
        detail = await refusal(endpoint)
    assert says in detail
    assert detail.startswith(f"m at {endpoint} ")
    assert len(detail) < 350


async def test_silence_has_an_end() -> None:
    with engine(200, completion("late"), [], threading.Event()) as endpoint:
        assert (
            await refusal(endpoint, Smoke(EngineKeys(), timeout_s=0.3))
            == f"m at {endpoint} did not answer within 0.3 s"
        )


async def test_nobody_listens() -> None:
    with engine(200, b"", []) as gone:
        pass
    assert f"m at {gone} could not be asked" in await refusal(gone)


EMBEDDING = {"data": [{"embedding": [0.5, -0.25, 0.0]}], "usage": {"prompt_tokens": 14}}
RANKING = {"results": [{"index": 1, "relevance_score": -9.5}, {"index": 0, "relevance_score": 4.0}]}


@pytest.mark.parametrize(
    ("task", "path", "answer", "says", "tokens"),
    [
        (Task.EMBED, "/v1/embeddings", EMBEDDING, "an embedding of 3 numbers", 14),
        (Task.RERANK, "/v1/rerank", RANKING, "a ranking of 2 documents", 0),
    ],
)
async def test_what_embeds_or_ranks_is_asked_for_that(
    task: Task, path: str, answer: dict[str, Any], says: str, tokens: int
) -> None:
    asked: list[dict[str, Any]] = []
    with engine(200, json.dumps(answer).encode(), asked) as endpoint:
        result = await ask(endpoint, task=task)
    assert (result.answer, result.completion_tokens, asked[0]["path"]) == (says, tokens, path)


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        (Task.EMBED, {"data": [{"embedding": [0.0, 0.0]}]}),
        (Task.EMBED, {"data": [{"embedding": []}]}),
        (Task.EMBED, {"choices": []}),
        (Task.RERANK, {"results": [{"index": 0, "relevance_score": 1.0}]}),
        (Task.RERANK, {"results": [{"index": 0, "relevance_score": 1.0}, {"index": 1, "relevance_score": None}]}),
    ],
)
async def test_an_embedding_without_direction_or_a_ranking_with_gaps_is_none(task: Task, answer: Any) -> None:
    with engine(200, json.dumps(answer).encode(), []) as endpoint:
        assert "answered 200 with something else than a" in await refusal(endpoint, task=task)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("llama", Task.GENERATE),
        ("nomic-bert", Task.EMBED),
        ("Qwen3ForCausalLM", Task.GENERATE),
        ("XLMRobertaModel", Task.EMBED),
        ("XLMRobertaForSequenceClassification", Task.RERANK),
    ],
)
def test_the_task_is_told_by_the_architecture(architecture: str, task: Task) -> None:
    assert task_of(architecture) is task
    assert bool(task_arguments(Engine.LLAMACPP, task)) is (task is not Task.GENERATE)

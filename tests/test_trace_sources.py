"""Span files, Jaeger and Tempo give the same tree."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.errors import CtlError
from cli.span_tree import trace_lines, tree
from cli.trace_sources import Files, TraceSource, client, collect, store_at
from runtime.config import TraceStoreConfig
from tests.otlp import line, span
from tests.trace_stores import TraceStores

JOB = "0a" * 16
PASS = "b0" * 16
EVENT = {"name": "turned down by n1", "attributes": [{"key": "llmgw.need", "value": {"intValue": "42"}}]}

SPANS: dict[str, list[dict[str, Any]]] = {
    "llmgw-worker": [
        span(JOB, 1, 0, "serve model", 0.0, 2.0, llmgw__job="job/serve/m/1"),
        span(JOB, 2, 1, "placement", 0.1, 1.6, links=((PASS, 13),)),
        span(PASS, 12, 0, "reconcile", 0.2, 0.25, links=((JOB, 1),)),
        span(PASS, 13, 12, "start replica", 0.3, 1.5, error="exited: code 1", llmgw__replica="m-0", events=(EVENT,)),
    ],
    "llmgw-agent": [span(PASS, 16, 13, "fetch weights", 0.32, 0.5, llmgw__detail="模型 “ü”")],
}


def files(tmp_path: Path) -> Files:
    for service, spans in SPANS.items():
        lines = [line(one, service=service) for one in spans]
        (tmp_path / f"{service}.jsonl.1").write_text("\n".join(lines[:1]) + "\n")
        (tmp_path / f"{service}.jsonl").write_text("\n".join(lines[1:]) + "\n{half a li\n")
    (tmp_path / "worker.jsonl.lock").write_text("not spans")
    return Files(tmp_path)


def stores() -> tuple[TraceStores, httpx.AsyncClient]:
    made = TraceStores(SPANS)
    return made, httpx.AsyncClient(transport=httpx.ASGITransport(made.app()))


async def lines_of(source: TraceSource, trace_id: str) -> list[str]:
    return trace_lines(tree(await collect(source, trace_id), trace_id))


WHOLE = [
    "serve model                2.0 s  job=job/serve/m/1",
    "└─ placement               1.5 s",
    "   └─ ⇢ ✗ start replica    1.2 s  replica=m-0",
    "         │  ! exited: code 1",
    "         │  · turned down by n1 need=42",
    '      └─ fetch weights    180 ms  detail="模型 “ü”"',
]


async def test_each_store_gives_the_same_tree_with_its_links(tmp_path: Path) -> None:
    _, http = stores()
    from_files = await lines_of(files(tmp_path), JOB)
    assert [re.sub(" +", " ", text) for text in from_files] == [re.sub(" +", " ", text) for text in WHOLE]
    async with http:
        assert await lines_of(store_at(TraceStoreConfig(tempo="http://store/tempo/"), http), JOB) == from_files
        assert await lines_of(store_at(TraceStoreConfig(jaeger="http://store/jaeger"), http), JOB) == from_files


async def test_each_store_finds_a_trace_by_what_a_span_is_about(tmp_path: Path) -> None:
    _, http = stores()
    async with http:
        for source in (
            files(tmp_path),
            store_at(TraceStoreConfig(tempo="http://store/tempo"), http),
            store_at(TraceStoreConfig(jaeger="http://store/jaeger"), http),
        ):
            assert await source.trace_of("llmgw.job", "job/serve/m/1") == JOB
            assert await source.trace_of("llmgw.replica", "m-0") == PASS
            assert await source.trace_of("llmgw.replica", "m-1") == ""
            assert await source.spans({"f" * 32}) == []


async def test_only_lines_that_can_matter_are_parsed(tmp_path: Path) -> None:
    source = files(tmp_path)
    with (tmp_path / "llmgw-agent.jsonl").open("a") as file:
        file.write(f"{{broken {JOB}\n")
    assert len(await source.spans({JOB})) == 2
    assert source.broken_lines == 1


async def test_headers_come_from_a_file_and_what_is_wrong_there_is_said(tmp_path: Path) -> None:
    secret = tmp_path / "headers"
    secret.write_text("Authorization: Bearer s3cret\n\nX-Scope-OrgID: a\n")
    query = TraceStoreConfig(tempo="http://store", headers_file=secret)
    made = client(query)
    assert (made.headers["authorization"], made.headers["x-scope-orgid"]) == ("Bearer s3cret", "a")
    await made.aclose()
    secret.write_text("just a token\n")
    with pytest.raises(CtlError, match=r"headers: line 1 is no `Name: value`") as refused:
        client(query)
    assert "token" not in str(refused.value).replace("tokens", "")
    secret.unlink()
    with pytest.raises(CtlError, match="cannot be read"):
        client(query)


ANSWERS = [
    (httpx.Response(500, text="out of order"), "answered /api/traces/.* with 500: out of order"),
    (httpx.Response(200, text="<html>"), "is no JSON: is that the address of a trace store's API"),
    (httpx.Response(200, json={"data": [{"spans": [{}]}]}), "is not what its API says"),
    (httpx.Response(200, json=[]), "is not what its API says"),
]


@pytest.mark.parametrize(("answer", "said"), ANSWERS)
async def test_a_store_that_answers_nonsense_is_one_sentence(answer: httpx.Response, said: str) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)) as http:
        for query in (TraceStoreConfig(jaeger="http://store"), TraceStoreConfig(tempo="http://store")):
            with pytest.raises(CtlError, match=said):
                await store_at(query, http).spans({JOB})


async def test_a_store_that_is_away_is_one_sentence() -> None:
    query = TraceStoreConfig(jaeger="http://127.0.0.1:9")
    async with client(query) as http:
        with pytest.raises(CtlError, match=r"the trace store at http://127\.0\.0\.1:9 does not answer"):
            await store_at(query, http).spans({JOB})

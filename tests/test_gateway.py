"""The gateway over real HTTP: fake engines on free ports, and routes from a fake source."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.app import MAX_BODY
from gateway.balance import SHUN_S, Balance
from tests.gateway_fakes import answering_once, engine, free_port, gateway
from tests.waiting import until

# -- which replica ----------------------------------------------------------------------------------------------------


def test_the_fewest_in_flight_are_chosen_and_equals_take_turns() -> None:
    balance = Balance(lambda: 0.0)
    order = []
    for _ in range(4):
        chosen = balance.pick(["a", "b"])
        assert chosen is not None
        order.append(chosen)
        with balance.busy(chosen):
            pass
    assert order == ["a", "b", "a", "b"]
    with balance.busy("a"):
        assert [balance.pick(["a", "b"]), balance.pick(["a", "b"], {"b"}), balance.pick(["a"], {"a"})] == [
            "b",
            "a",
            None,
        ]
        assert balance.in_flight("a") == 1
    assert balance.in_flight("a") == 0


def test_an_unreachable_endpoint_goes_last_for_a_while() -> None:
    now = [100.0]
    balance = Balance(lambda: now[0])
    balance.unreachable("a")
    with balance.busy("b"):
        assert balance.pick(["a", "b"]) == "b"
        assert balance.pick(["a"]) == "a", "the last one left is still tried"
        now[0] += SHUN_S
        assert balance.pick(["a", "b"]) == "a"


def test_endpoints_that_are_gone_are_forgotten_once_idle() -> None:
    balance = Balance(lambda: 0.0)
    with balance.busy("a"):
        balance.forget_except(["b"])
        assert balance.in_flight("a") == 1
    balance.forget_except(["b"])
    assert balance.pick(["a", "b"]) == "a", "as one never seen"


# -- the way through --------------------------------------------------------------------------------------------------


async def test_a_request_reaches_the_engine_and_its_answer_the_client() -> None:
    async with engine("e1") as (fake, url), gateway() as front:
        front.source.set("org/model", url)
        answer = await front.client.post(
            "/v1/embeddings?trace=1",
            json={"model": "org/model", "input": "hello"},
            headers={
                "Authorization": "Bearer secret",
                "x-api-key": "secret",
                "cookie": "secret=1",
                "Connection": "keep-alive, X-Hop",
                "X-Hop": "only for this hop",
                "X-Request-Id": "r-1",
                "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "baggage": "who=me",
            },
        )
        assert (answer.status_code, answer.json()) == (200, {"engine": "e1"})
        assert answer.headers["x-engine"] == "e1"
        assert "keep-alive" not in answer.headers
        headers, target, body = fake.requests[0]
        assert target == "/v1/embeddings?trace=1"
        assert json.loads(body) == {"model": "org/model", "input": "hello"}
        assert headers["x-request-id"] == "r-1"
        assert headers["content-type"] == "application/json"
        assert headers["traceparent"].split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
        assert headers["host"] == url.removeprefix("http://")
        assert headers["connection"] == "close"
        assert {"authorization", "x-api-key", "cookie", "x-hop", "baggage"}.isdisjoint(headers)


async def test_an_engines_own_error_passes_unchanged() -> None:
    async with engine("e1") as (_, url), gateway() as front:
        front.source.set("m", url)
        answer = await front.chat("m", status=422)
        assert (answer.status_code, answer.json()) == (422, {"error": "engine says no"})


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    async with engine("e1") as (fake, url), gateway() as front:
        front.source.set("m", url)
        async with front.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = answer.aiter_raw()
            assert await anext(parts) == b'data: {"token": 1}\n\n', "before the engine has gone on"
            assert front.balance.in_flight(url) == 1
            fake.gate.set()
            assert b"".join([part async for part in parts]) == b"data: [DONE]\n\n"
        await until(lambda: front.balance.in_flight(url) == 0)
        assert fake.cancelled == 0


async def test_requests_spread_over_the_replicas() -> None:
    async with engine("e1") as (_, one), engine("e2") as (_, two), gateway() as front:
        front.source.set("m", one, two)
        names = [(await front.chat("m")).json()["engine"] for _ in range(4)]
        assert sorted(names) == ["e1", "e1", "e2", "e2"]
        async with front.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as held:
            parts = held.aiter_raw()  # while it is referenced, the stream stays open
            await anext(parts)
            await until(lambda: front.balance.in_flight(one) + front.balance.in_flight(two) == 1)
            busy, idle = (one, two) if front.balance.in_flight(one) else (two, one)
            for _ in range(3):
                assert (await front.chat("m")).json()["engine"] == ("e2" if busy == one else "e1")
                await until(lambda: front.balance.in_flight(idle) == 0)


@pytest.mark.parametrize("body", [{"stream": True}, {"slow": True}], ids=["in the stream", "before the answer"])
async def test_a_client_that_goes_away_ends_the_engines_request(body: dict[str, bool]) -> None:
    async with engine("e1") as (fake, url), gateway() as front:
        front.source.set("m", url)

        async def ask() -> None:
            async with front.client.stream("POST", "/v1/completions", json={"model": "m", **body}) as answer:
                async for _ in answer.aiter_raw():
                    pass

        asking = asyncio.create_task(ask())
        await until(lambda: len(fake.requests) == 1 and (fake.streaming == 1 or "slow" in body))
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: fake.cancelled == 1)
        await until(lambda: front.balance.in_flight(url) == 0)


# -- when replicas fail -----------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_tried_on_another_replica() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    async with engine("e1") as (_, url), gateway() as front:
        front.source.set("m", dead, url)
        answers = [await front.chat("m") for _ in range(3)]
        assert [answer.json()["engine"] for answer in answers] == ["e1"] * 3
        assert front.balance.pick([dead, url]) == url, "and is not tried first again"


async def test_without_a_replica_that_can_be_reached_it_is_a_bad_gateway() -> None:
    async with gateway() as front:
        front.source.set("m", f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}")
        answer = await front.chat("m")
        assert answer.status_code == 502
        assert answer.json()["error"] == {
            "message": "none of the 2 replicas of m can be reached: try again in a few seconds",
            "type": "server_error",
            "param": None,
            "code": "upstream_unreachable",
        }


async def test_a_request_that_was_sent_is_not_sent_again() -> None:
    async with answering_once(b"") as broken, engine("e1") as (fake, url), gateway() as front:
        front.source.set("m", broken, url)
        answer = await front.chat("m")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_broke_off")
        assert fake.requests == []


async def test_no_request_goes_where_an_engine_may_be_closing() -> None:
    """As llama.cpp does: it says that the connection stays, and closes it once the stream has ended."""
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")  # another request: it is too late
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server, gateway() as front:
        front.source.set("m", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert [(await front.chat("m")).status_code for _ in range(3)] == [200] * 3
        assert connections == 3


async def test_requests_use_up_no_ports() -> None:
    async with engine("e1") as (_, url), gateway() as front:
        front.source.set("m", url)
        for _ in range(20):
            assert (await front.chat("m")).status_code == 200
        port = f":{int(url.rpartition(':')[2]):04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        waiting = [fields for fields in lines if fields[2].endswith(port) and fields[3] == "06"]
        assert len(waiting) < 5, "now and then the gateway is the first to close"


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with answering_once(head + b"9\r\ndata: one\r\n") as broken, gateway() as front:
        front.source.set("m", broken)
        received = bytearray()

        async def read() -> None:
            async with front.client.stream("POST", "/v1/completions", json={"model": "m"}) as answer:
                async for part in answer.aiter_raw():
                    received.extend(part)

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
        first, event = bytes(received).split(b"\n\ndata: ", 1)
        assert first == b"data: one"
        assert json.loads(event)["error"]["message"] == "the replica of m broke off in the middle of its answer"


async def test_a_body_that_breaks_off_is_cut_for_the_client_too() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    async with answering_once(head + b'{"half": ') as broken, gateway() as front:
        front.source.set("m", broken)
        with pytest.raises(httpx.RemoteProtocolError):
            await front.chat("m")


# -- what the gateway refuses -----------------------------------------------------------------------------------------

BAD_REQUESTS: list[tuple[str, str, str, bytes, int, str]] = [
    ("no JSON", "POST", "/v1/chat/completions", b"{", 400, "invalid_json"),
    ("too deep", "POST", "/v1/chat/completions", b"[" * 200_000, 400, "invalid_json"),
    ("a list", "POST", "/v1/chat/completions", b"[]", 400, "invalid_json"),
    ("no model", "POST", "/v1/chat/completions", b"{}", 400, "model_missing"),
    ("model is a number", "POST", "/v1/chat/completions", b'{"model": 7}', 400, "model_missing"),
    ("empty model", "POST", "/v1/chat/completions", b'{"model": ""}', 400, "model_missing"),
    ("unknown model", "POST", "/v1/chat/completions", b'{"model": "nope"}', 404, "model_not_found"),
    ("unknown model asked for", "GET", "/v1/models/nope/x", b"", 404, "model_not_found"),
    ("escaped path", "POST", "/v1/%2e%2e/metrics", b'{"model": "m"}', 404, "not_found"),
    ("empty segment", "POST", "/v1//metrics", b'{"model": "m"}', 404, "not_found"),
    ("other path", "GET", "/metrics", b"", 404, "not_found"),
    ("wrong method", "GET", "/v1/chat/completions", b"", 405, "bad_request"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"), [case[1:] for case in BAD_REQUESTS], ids=[c[0] for c in BAD_REQUESTS]
)
async def test_a_wrong_request_is_answered_in_openais_shape(
    method: str, path: str, body: bytes, status: int, code: str
) -> None:
    async with engine("e1") as (fake, url), gateway() as front:
        front.source.set("m", url)
        answer = await front.client.request(method, path, content=body)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert fake.requests == []


async def test_an_unknown_model_is_told_which_there_are() -> None:
    async with gateway() as front:
        front.source.set("b")
        front.source.set("a", "http://127.0.0.1:1")
        answer = await front.chat("c")
        assert answer.json()["error"]["message"] == "no model is named c; there are: a, b"


async def test_a_body_beyond_the_limit_is_refused_without_reading_it_all() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY // 2**20 + 4):
            yield b" " * 2**20

    async with gateway() as front:
        declared = await front.client.post("/v1/completions", content=b" " * (MAX_BODY + 1))
        assert (declared.status_code, declared.json()["error"]["code"]) == (413, "request_too_large")
        chunked = await front.client.post("/v1/completions", content=endless())
        assert chunked.status_code == 413


async def test_a_model_without_a_ready_replica_says_why_and_when_to_come_back() -> None:
    why = "0/1 nodes fit big: 1 memory (need 80 GiB, best free 4 GiB on n1)"
    async with gateway() as front:
        front.source.set("big", waiting=why)
        front.source.set("soon")
        big, soon = await front.chat("big"), await front.chat("soon")
        assert (big.status_code, big.headers["retry-after"]) == (503, "5")
        assert big.json()["error"]["message"] == f"big cannot answer now: {why}"
        assert soon.json()["error"] == {
            "message": "soon cannot answer now: no replica is ready yet",
            "type": "server_error",
            "param": None,
            "code": "model_not_ready",
        }


# -- routes and health ------------------------------------------------------------------------------------------------


async def test_models_are_listed_in_openais_shape() -> None:
    async with gateway() as front:
        front.source.set("org/b", "http://127.0.0.1:1", "http://127.0.0.1:2")
        front.source.set("a")
        await front.table.refresh()
        listed = (await front.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(entry["id"], entry["ready_replicas"]) for entry in listed["data"]] == [("a", 0), ("org/b", 2)]
        one = (await front.client.get("/v1/models/org/b")).json()
        assert one == {"id": "org/b", "object": "model", "created": 0, "owned_by": "llmgw", "ready_replicas": 2}


async def test_a_miss_asks_for_the_routes_at_once_and_many_misses_ask_together() -> None:
    async with engine("e1") as (_, url), gateway() as front:
        front.source.set("m", url)
        assert (await front.chat("m")).status_code == 200, "nobody polls in this test"
        asked = front.source.asked
        answers = await asyncio.gather(*(front.chat("nope") for _ in range(30)))
        assert {answer.status_code for answer in answers} == {404}
        assert 1 <= front.source.asked - asked <= 10


async def test_the_poll_notices_what_changed() -> None:
    async with gateway() as front:
        polling = asyncio.create_task(front.table.poll())
        try:
            await until(lambda: not front.table.trouble)
            front.source.set("m", "http://127.0.0.1:1")
            await until(lambda: len(front.table.all()) == 1, timeout=5)
        finally:
            polling.cancel()


async def test_routes_that_are_stale_are_read_again_before_a_request_goes_by_them() -> None:
    async with engine("e1") as (_, old), engine("e2") as (_, new), gateway() as front:
        front.source.set("m", old)
        assert (await front.chat("m")).json() == {"engine": "e1"}, "nobody polls in this test"
        front.source.set("m", new)
        assert (await front.chat("m")).json() == {"engine": "e1"}
        await until(lambda: front.table.stale)
        assert (await front.chat("m")).json() == {"engine": "e2"}


async def test_the_last_routes_serve_on_while_temporal_is_away() -> None:
    async with engine("e1") as (_, url), gateway() as front:
        front.source.trouble = "Temporal is not reachable at there:7233"
        assert (await front.client.get("/health")).status_code == 503
        early = await front.chat("m")
        assert (early.status_code, early.json()["error"]["message"]) == (503, front.source.trouble)
        assert (await front.client.get("/v1/models")).status_code == 503
        front.source.trouble = ""
        front.source.set("m", url)
        assert (await front.chat("m")).status_code == 200
        assert (await front.client.get("/health")).json() == {"status": "ok"}
        front.source.trouble = "Temporal is not reachable at there:7233"
        await front.table.refresh()
        assert (await front.chat("m")).status_code == 200
        sick = await front.client.get("/health")
        assert (sick.status_code, sick.json()["detail"]) == (503, front.source.trouble)

"""Requests for a model that nothing serves: held while it starts, the fleet told, and let go of in time."""

import asyncio
import time

import pytest

from gateway import hold
from tests.gateway_fakes import Front, engine, free_port, gateway
from tests.waiting import until


async def held(front: Front, count: int = 1) -> None:
    await until(lambda: front.hold.held == count)


async def test_a_request_waits_for_the_model_to_start_and_the_fleet_is_told() -> None:
    async with engine("e1") as (fake, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m", waiting="no replica is wanted")
        asking = asyncio.create_task(front.chat("m", temperature=0.5))
        await held(front)
        await until(lambda: front.source.called == ["m"])
        assert not asking.done()
        front.source.set("m", url)
        answer = await asking
        assert (answer.status_code, answer.json()) == (200, {"engine": "e1"})
        assert fake.requests[0][2] == b'{"model":"m","temperature":0.5}'
        assert front.hold.held == 0


async def test_when_the_time_is_up_it_says_why_and_when_to_come_back() -> None:
    async with gateway(wait_for_start_s=0.6) as front:
        front.source.set("m", waiting="no replica is wanted")
        asking = asyncio.create_task(front.chat("m"))
        await held(front)
        front.source.set("m", waiting="starting m-0 on n1")
        answer = await asking
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["message"] == "m cannot answer now: starting m-0 on n1"
        assert front.hold.held == 0


async def test_without_a_wait_the_answer_comes_at_once_and_the_fleet_is_told_all_the_same() -> None:
    async with gateway(wait_for_start_s=0) as front:
        front.source.set("m")
        assert (await front.chat("m")).status_code == 503
        await until(lambda: front.source.called == ["m"])


async def test_many_that_wait_ask_and_tell_together() -> None:
    async with engine("e1") as (_, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m")
        front.source.set("other")
        asking = [asyncio.create_task(front.chat("m")) for _ in range(60)]
        asking += [asyncio.create_task(front.chat("other")) for _ in range(3)]
        await held(front, 63)
        began, asked = time.monotonic(), front.source.asked
        await until(lambda: front.source.asked >= asked + 3)
        assert front.source.asked - asked <= 4 * (time.monotonic() - began + 1), "four questions a second for all"
        assert sorted(front.source.called) == ["m", "other"]
        front.source.set("m", url)
        front.source.set("other", url)
        assert {(await answer).status_code for answer in asking} == {200}


async def test_while_somebody_waits_the_fleet_is_told_again() -> None:
    async with engine("e1") as (_, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m")
        asking = asyncio.create_task(front.chat("m"))
        await until(lambda: front.source.called == ["m", "m"], hold.WANTED_EVERY_S + 3)
        front.source.set("m", url)
        assert (await asking).status_code == 200


async def test_a_client_that_goes_away_stops_the_wait() -> None:
    async with engine("e1") as (fake, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m")
        asking = asyncio.create_task(front.chat("m"))
        await held(front)
        asking.cancel()
        await asyncio.wait({asking})
        await held(front, 0)
        front.source.set("m", url)
        await front.table.refresh()
        assert fake.requests == []


async def test_a_model_that_is_removed_meanwhile_is_unknown() -> None:
    async with gateway(wait_for_start_s=30) as front:
        front.source.set("m")
        asking = asyncio.create_task(front.chat("m"))
        await held(front)
        del front.source.now["m"]
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_beyond_the_number_that_may_wait_it_is_refused_at_once() -> None:
    async with engine("e1") as (_, url), gateway(wait_for_start_s=30, max_held=3) as front:
        front.source.set("m")
        asking = [asyncio.create_task(front.chat("m")) for _ in range(3)]
        await held(front, 3)
        more = await front.chat("m")
        assert (more.status_code, more.headers["retry-after"]) == (503, "5")
        assert more.json()["error"]["code"] == "too_many_waiting"
        assert more.json()["error"]["message"] == "m is not ready, and 3 requests wait already: try again later"
        front.source.set("m", url)
        assert {(await answer).status_code for answer in asking} == {200}


async def test_beyond_the_bytes_that_may_wait_it_is_refused_at_once() -> None:
    async with engine("e1") as (_, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m")
        large = "x" * (hold.MAX_HELD_BYTES // 9)
        asking = [asyncio.create_task(front.chat("m", prompt=large)) for _ in range(8)]
        await held(front, 8)
        more = await front.chat("m", prompt=large)
        assert more.json()["error"]["code"] == "too_many_waiting"
        front.source.set("m", url)
        assert {(await answer).status_code for answer in asking} == {200}


async def test_a_temporal_that_is_away_is_waited_for_too() -> None:
    async with engine("e1") as (_, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m")
        await front.table.refresh()
        front.source.trouble = "Temporal is not reachable at there:7233"
        asking = asyncio.create_task(front.chat("m"))
        await until(lambda: front.source.called == ["m"])
        front.source.trouble = ""
        front.source.set("m", url)
        assert (await asking).status_code == 200


@pytest.mark.parametrize("next_endpoint", ["later", "at once"])
async def test_a_model_whose_replicas_went_since_the_routes_were_read_is_waited_for(next_endpoint: str) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with engine("e1") as (_, url), gateway(wait_for_start_s=30) as front:
        front.source.set("m", gone)
        await front.table.refresh()
        front.source.set("m", *([url] if next_endpoint == "at once" else []))
        asking = asyncio.create_task(front.chat("m"))
        if next_endpoint == "later":
            await held(front)
            assert front.source.called == ["m"]
            front.source.set("m", url)
        assert (await asking).json() == {"engine": "e1"}


async def test_what_no_request_can_bring_is_refused_at_once_with_the_cause() -> None:
    async with gateway(wait_for_start_s=30) as front:
        front.source.bar("m", "its start was given up: bad_flag")
        answer = await front.chat("m")
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, None)
        assert answer.json()["error"]["code"] == "model_barred"
        assert answer.json()["error"]["message"] == "m cannot answer: its start was given up: bad_flag"
        assert front.source.called == [], "nobody is asked for what cannot come"


async def test_a_wait_ends_when_it_cannot_help_any_more() -> None:
    async with gateway(wait_for_start_s=30) as front:
        front.source.set("m", waiting="starting m-0 on n1")
        asking = asyncio.create_task(front.chat("m"))
        await held(front)
        front.source.bar("m", "its start was given up: exited")
        assert (await asking).json()["error"]["code"] == "model_barred"
        assert front.hold.held == 0

"""The quota: what goes is what was used longest ago, and never what runs, starts or is fetched."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from pydantic import ByteSize

from agent.room import Kept, surplus
from agent.weights import WeightStore
from fleet.reasons import Reason, StepError
from fleet.spec import Format, Weights
from runtime.config import WeightsConfig
from runtime.manifest import MANIFEST
from tests.stub_hub import Fault, stub_hub
from tests.transfers import MIB, content, listed
from tests.waiting import until


def kept(name: str, size: int, used_at: float = 1.0, *, loose: bool = True) -> Kept:
    return Kept(name, size, used_at, loose)


@pytest.mark.parametrize(
    ("there", "need", "quota", "free", "going"),
    [
        ([], 10, 10, 10, []),
        ([kept("a", 5, 2), kept("b", 5, 1)], 5, 15, 99, []),
        ([kept("a", 5, 2), kept("b", 5, 1)], 5, 14, 99, ["b"]),
        ([kept("a", 5, 2), kept("b", 5, 1)], 5, 9, 99, ["b", "a"]),
        ([kept("a", 5, 2), kept("b", 5, 1, loose=False)], 5, 12, 99, ["a"]),
        ([kept("a", 5, 2), kept("rest.partial", 3, 0)], 5, 12, 99, ["rest.partial"]),
        ([kept("a", 5, 2), kept("b", 5, 1)], 5, 99, 2, ["b"]),  # the quota has room, the disk has not
    ],
)
def test_what_goes(there: list[Kept], need: int, quota: int, free: int, going: list[str]) -> None:
    assert [one.name for one in surplus(there, need, quota, free, "m")] == going


@pytest.mark.parametrize(("need", "free"), [(11, 99), (6, 99), (5, 1)])
def test_what_cannot_be_made_to_fit_is_refused_and_nothing_goes(need: int, free: int) -> None:
    with pytest.raises(StepError, match="of the quota of 10 B, 5 B is in use") as caught:
        surplus([kept("a", 5, loose=False)], need, 10, free, "m")
    assert caught.value.failure.reason is Reason.DISK


def weights(name: str, mirror: str, size: int = MIB) -> Weights:
    files = tuple(listed({f"{name}.gguf": content(name, size)}))
    return Weights(model_id=name, format=Format.GGUF, entry=files[0].path, files=files, mirror=mirror)


DATA = {f"{name}.gguf": content(name, MIB) for name in "abcd"}
LIMIT = WeightsConfig(hub_cache=None, quota=ByteSize(2 * MIB + MIB // 2))


def none(done: int, total: int) -> None:
    assert done <= total


async def test_the_model_used_longest_ago_goes_and_the_fleet_is_told(tmp_path: Path) -> None:
    used: set[str] = set()
    store = WeightStore(tmp_path / "w", 0, LIMIT, in_use=lambda: used)
    with stub_hub(DATA) as hub:
        for age, name in ((300, "a"), (200, "b")):
            await store.bring(weights(name, hub.url), none)
            os.utime(tmp_path / "w" / name / MANIFEST, (age, age))
        assert store.held() == ("a", "b")
        await store.bring(weights("c", hub.url), none)
        assert store.held() == ("a", "c")
        # To use it is to keep it: an old one that is started again is young.
        os.utime(tmp_path / "w" / "a" / MANIFEST, (100, 100))
        assert (await store.bring(weights("a", hub.url), none)).outcome == "local"
        os.utime(tmp_path / "w" / "c" / MANIFEST, (200, 200))
        await store.bring(weights("d", hub.url), none)
        assert store.held() == ("a", "d")
        # What runs stays, however old; where nothing may go, the new one is refused.
        used |= {"a", "d"}
        with pytest.raises(StepError) as caught:
            await store.bring(weights("b", hub.url), none)
        assert caught.value.failure.reason is Reason.DISK
        assert store.held() == ("a", "d")
        used -= {"d"}
        await store.bring(weights("b", hub.url), none)
        assert store.held() == ("a", "b")
        await store.close()
    assert {path.name for path in (tmp_path / "w").iterdir() if path.is_dir()} == {"a", "b"}


async def test_what_is_fetched_or_started_counts_and_stays(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w", 0, LIMIT)
    hold = threading.Event()
    with stub_hub(DATA, faults=[Fault("resolve", 1, hold=hold, path="b.gguf")]) as hub:
        await store.bring(weights("a", hub.url), none)
        fetching = asyncio.ensure_future(store.bring(weights("b", hub.url), none))
        try:
            await until(lambda: hub.asked("b.gguf"))
            with store.claim(weights("a", hub.url)), pytest.raises(StepError):
                await store.bring(weights("c", hub.url), none)
            assert store.held() == ("a",)
            await store.bring(weights("c", hub.url), none)
            assert store.held() == ("c",)
        finally:
            hold.set()
        assert (await fetching).copied_bytes == MIB
        assert store.held() == ("b", "c")
        await store.close()


async def test_room_is_what_would_be_made(tmp_path: Path) -> None:
    used: set[str] = set()
    store = WeightStore(tmp_path / "w", 0, LIMIT, in_use=lambda: used)
    with stub_hub(DATA) as hub:
        await store.bring(weights("a", hub.url), none)
        await store.close()
        block = 64 * 1024  # the manifest, and what the file system adds
        assert abs(store.room(10 * MIB) - 2.5 * MIB) < block
        used.add("a")
        assert abs(store.room(10 * MIB) - 1.5 * MIB) < block
        assert store.room(MIB) == MIB
        assert WeightStore(tmp_path / "w", 0, WeightsConfig(hub_cache=None)).room(MIB) == MIB


async def test_what_a_killed_fetch_left_goes_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w", 0, LIMIT)
    with stub_hub(DATA) as hub:
        await store.bring(weights("a", hub.url), none)
        left = tmp_path / "w" / "old.partial"
        left.mkdir()
        (left / "x").write_bytes(bytes(MIB))
        await store.bring(weights("b", hub.url), none)
        await store.close()
        assert store.held() == ("a", "b")
        assert not left.exists()

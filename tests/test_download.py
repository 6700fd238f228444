"""Downloads from a real HTTP server that cuts, lies, refuses and fails."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.reasons import Reason
from tests.stub_hub import Fault, Hub, stub_hub
from tests.transfers import DATA, MIB, bring, content, failure, holds, write


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "m-1"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stub_hub(DATA) as served:
        yield served


async def test_http_files_arrive(hub: Hub, target: Path) -> None:
    assert (await bring(DATA, hub.url, target)).copied_bytes == sum(map(len, DATA.values()))
    assert holds(target, DATA)
    assert all(headers["accept-encoding"] == "identity" for headers in hub.asked(""))


def ranges(hub: Hub, part: str) -> list[str]:
    return sorted((headers["range"] for headers in hub.asked(part)), key=lambda text: int(text[6:].split("-")[0]))


async def test_a_file_is_fetched_in_ranges_on_kept_connections(hub: Hub, target: Path) -> None:
    await bring(DATA, hub.url, target)
    last = len(DATA["model.gguf"]) - 1
    assert ranges(hub, "model.gguf") == [
        f"bytes=0-{4 * MIB - 1}",
        f"bytes={4 * MIB}-{8 * MIB - 1}",
        f"bytes={8 * MIB}-{last}",
    ]
    assert hub.given == sum(map(len, DATA.values()))


def read_so_far() -> int:
    """Bytes that this process has read from files."""
    rows = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("rchar:"))


@pytest.mark.parametrize(("over_http", "most"), [(True, MIB), (False, 33 * MIB)])
async def test_nothing_is_read_again_to_be_verified(tmp_path: Path, target: Path, over_http: bool, most: int) -> None:
    """What comes by the network is read from no file at all, what comes from a directory once."""
    data = {f"{name}.gguf": content(name, 16 * MIB) for name in "ab"}
    with stub_hub(data) as hub:
        base = hub.url if over_http else write(tmp_path / "large", data).as_uri()
        before = read_so_far()
        await bring(data, base, target)
        assert read_so_far() - before < most
    assert holds(target, data)


async def test_cut_connection_is_resumed(hub: Hub, target: Path) -> None:
    hub.faults.append(Fault("resolve", 1, cut_after=MIB, path="model.gguf", since=4 * MIB))
    fetched = await bring(DATA, hub.url, target)
    assert fetched.copied_bytes == sum(map(len, DATA.values()))
    assert len(ranges(hub, "model.gguf")) == 4
    assert any(text.startswith((f"bytes={5 * MIB}-", f"bytes={9 * MIB}-")) for text in ranges(hub, "model.gguf"))
    assert holds(target, DATA)


async def test_server_without_ranges_is_asked_from_the_start(hub: Hub, target: Path) -> None:
    hub.ranges = False
    hub.faults.append(Fault("resolve", 1, cut_after=4 * MIB, path="model.gguf"))
    await bring(DATA, hub.url, target)
    assert holds(target, DATA)
    assert len(hub.asked("model.gguf")) <= 8, "one body is read on, not one for each part"


async def test_errors_that_pass_are_waited_out(hub: Hub, target: Path) -> None:
    hub.faults += [Fault("resolve", 1, status=500), Fault("resolve", 1, status=429, headers={"Retry-After": "0"})]
    await bring(DATA, hub.url, target)
    assert holds(target, DATA)


async def test_one_wrong_answer_is_fetched_again_alone(hub: Hub, target: Path) -> None:
    hub.faults.append(Fault("resolve", 1, flip=True, path="model.gguf"))
    await bring(DATA, hub.url, target)
    assert holds(target, DATA)
    assert len(hub.asked("model.gguf")) == 6
    assert len(hub.asked("100%")) == 1


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        (Fault("resolve", 99, status=401, path="model.gguf"), Reason.REPO_FORBIDDEN, "answers 401 for model.gguf"),
        (Fault("resolve", 99, status=403, path="model.gguf"), Reason.REPO_FORBIDDEN, "answers 403 for model.gguf"),
        (Fault("resolve", 99, status=404, path="model.gguf"), Reason.WEIGHTS_MISSING, "has no model.gguf"),
        (
            Fault("resolve", 99, status=503, path="model.gguf"),
            Reason.HUB_UNREACHABLE,
            "gave 0 of 9437201 bytes of model.gguf, then: status 503",
        ),
        (
            Fault("resolve", 99, cut_after=0, path="model.gguf"),
            Reason.HUB_UNREACHABLE,
            "gave 0 of 9437201 bytes of model.gguf",
        ),
        (Fault("resolve", 99, flip=True, path="model.gguf"), Reason.WEIGHTS_CORRUPT, "model.gguf has the SHA-256"),
    ],
)
async def test_errors_that_stay_are_named(hub: Hub, target: Path, fault: Fault, reason: Reason, says: str) -> None:
    hub.faults.append(fault)
    found, detail = await failure(asyncio.ensure_future(bring(DATA, hub.url, target)))
    assert found is reason
    assert says in detail
    assert "secret-in-the-body" not in detail
    assert not target.exists()


async def test_other_size_than_listed_is_refused_before_its_bytes(hub: Hub, target: Path) -> None:
    hub.files["model.gguf"] = DATA["model.gguf"] + b"x"
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, hub.url, target)))
    assert reason is Reason.WEIGHTS_CORRUPT
    assert "has 9437202 bytes for model.gguf, 9437201 are expected" in detail


async def test_nobody_listens(target: Path) -> None:
    with stub_hub(DATA) as gone:
        pass
    reason, detail = await failure(asyncio.ensure_future(bring(DATA, gone.url, target)))
    assert reason is Reason.HUB_UNREACHABLE
    assert gone.url.removeprefix("http://") in detail


async def test_failure_that_may_pass_keeps_what_came(hub: Hub, target: Path) -> None:
    hub.faults += [
        Fault("resolve", 1, cut_after=MIB, path="model.gguf", since=8 * MIB),
        Fault("resolve", 99, status=500, path="model.gguf", since=8 * MIB),
    ]
    assert (await failure(asyncio.ensure_future(bring(DATA, hub.url, target))))[0] is Reason.HUB_UNREACHABLE
    hub.faults.clear()
    fetched = await bring(DATA, hub.url, target)
    assert fetched.copied_bytes == len(DATA["model.gguf"]) - 9 * MIB
    assert holds(target, DATA)

"""`ctl replica logs`: the newest launch, another one, all of it, what comes, and where to look from elsewhere."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client
from typer.testing import CliRunner, Result

from agent.shim import SEGMENT_BYTES, Log
from cli.__main__ import app
from tests.control import control_plane
from tests.ctl import Ctl, ctl_environment, ctl_of
from tests.test_workflows import SERVE

NOWHERE = "127.0.0.1:9"
"""No Temporal is there: logs on this machine are shown all the same."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "agent.yaml").write_text("node: n1\ndata: node\n")
    return home


def wrote(
    home: Path, name: str, data: bytes, *, replica: str = "tiny-0", rank: int = 0, code: int | None = None
) -> None:
    directory = home / "node" / "logs" / f"{replica}.{rank}"
    directory.mkdir(parents=True, exist_ok=True)
    Log(str(directory / f"{name}.log")).write(data)
    if code is not None:
        (directory / f"{name}.exit").write_text(json.dumps({"code": code, "signal": None}))


def ctl(home: Path, *arguments: str) -> Result:
    """In this process: it asks nobody but the disk."""
    return CliRunner().invoke(app, ["replica", "logs", "tiny-0", *arguments], env={"LLMGW_HOME": str(home)})


def shown(home: Path, *arguments: str) -> list[str]:
    result = ctl(home, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_newest_launch_or_another_one(home: Path) -> None:
    wrote(home, "9-1", b"first\n", code=1)
    wrote(home, "9-2", b"second\n", code=1)
    wrote(home, "10-1", b"a\nb\nlatest")
    assert shown(home) == ["a", "b", "latest"]
    assert shown(home, "-n", "1") == ["latest"]
    assert shown(home, "--previous") == ["second"]
    assert shown(home, "--attempt", "9-1") == ["first"]
    assert shown(home, "--attempt", "9") == ["second"]
    refused = str(ctl(home, "--attempt", "8").exception)
    assert refused.startswith("tiny-0.0 has no launch 8 here; there are: 9-1 (")
    assert "exit code 1), 10-1 (" in refused
    assert str(ctl(home, "-f", "--previous").exception).endswith("leave out --attempt, --previous and --all")


def test_a_long_log_is_shown_across_its_segments_with_its_gap(home: Path) -> None:
    count = 5 * SEGMENT_BYTES // 4096
    wrote(home, "1-1", b"".join(b"line %4090d\n" % number for number in range(count)))
    over_the_border = SEGMENT_BYTES // 4096 + 10
    end = shown(home, "-n", str(over_the_border))
    numbers = [int(line.removeprefix("line ")) for line in end]
    assert numbers == list(range(count - over_the_border, count))
    lines = shown(home, "--all")
    assert lines[0].split() == ["line", "0"]
    assert [line for line in lines if not line.startswith("line ")] == ["… 8 MiB of output are not kept …"]
    assert lines[-1] == end[-1]


def test_each_shard_has_a_log_of_its_own(home: Path) -> None:
    wrote(home, "1-1", b"head\n")
    wrote(home, "1-1", b"rest\n", rank=1)
    wrote(home, "1-1", b"another replica's\n", replica="tiny-00")
    assert shown(home) == ["head", "rest"]


@pytest.fixture
async def following(home: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    wrote(home, "1-1", b"old\nbegun")
    process = await Ctl(ctl_environment(home, NOWHERE)).start("replica", "logs", "tiny-0", "-f", "-n", "1")
    yield process
    if process.returncode is None:
        process.kill()
    await process.communicate()


async def test_what_comes_is_followed_over_segments_and_to_the_next_launch(
    home: Path, following: asyncio.subprocess.Process
) -> None:
    async def line() -> str:
        assert following.stdout is not None
        return (await asyncio.wait_for(following.stdout.readline(), 60)).decode().rstrip("\n")

    assert await line() == "begun"
    wrote(home, "1-1", b" and ended\n")
    assert await line() == " and ended"
    log = Log(str(home / "node" / "logs" / "tiny-0.0" / "1-1.log"))
    log.write((b"x" * 4095 + b"\n") * (SEGMENT_BYTES // 4096) + b"after the border\n")
    while (last := await line()) != "after the border":
        assert last == "x" * 4095
    wrote(home, "2-1", b"the next launch\n")
    assert await line() == "the next launch"
    following.send_signal(signal.SIGINT)
    assert following.stderr is not None
    assert "tiny-0.0 2-1:" in (await following.stderr.read()).decode()
    assert await following.wait() == 130


async def test_elsewhere_it_says_where_to_look(client: Client, tmp_path: Path) -> None:
    async with control_plane(client) as cell, cell.node("n1") as node:
        node.inventory = node.inventory.model_copy(update={"logs": str(tmp_path / "there")})
        await node.join()
        await cell.run(SERVE)
        ctl = ctl_of(cell, tmp_path / "home")
        code, out, err = await ctl.run("replica", "logs", "tiny-0")
        assert (code, out) == (1, "")
        assert f"on {node.name} (127.0.0.1) read {tmp_path}/there/tiny-0.0/latest" in err
        code, _, err = await ctl.run("replica", "logs", "none-0")
        assert (code, "no replica is named none-0; there are: tiny-0" in err) == (1, True)
        (tmp_path / "there" / "tiny-0.0").mkdir(parents=True)
        Log(str(tmp_path / "there" / "tiny-0.0" / "1-1.log")).write(b"here after all\n")
        code, out, _ = await ctl.run("replica", "logs", "tiny-0")
        assert (code, out) == (0, "here after all\n")

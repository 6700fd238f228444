"""The demo as a newcomer runs it: a fresh clone in an empty directory, one command, and nothing left afterwards."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import psutil
import pytest

from cli.span_tree import tree
from tests.real_engine import ROOT
from tests.traced import assert_whole, spans_in
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("real_engine"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `git clone` of the present state would give: every file git tracks or would, and nothing else."""
    target = tmp_path_factory.mktemp("clone") / "llmgw"
    listed = subprocess.run(
        [shutil.which("git") or "git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    return target


@asynccontextmanager
async def ctl(clone: Path, *arguments: str, **extra: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A ctl of the clone with a home of its own; whatever it leaves is ended."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("LLMGW", "TEMPORAL", "PYTHON"))}
    process = await asyncio.create_subprocess_exec(
        str(clone / "ctl"),
        *arguments,
        cwd=clone.parent,
        env={**outside, **extra},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for left in of(clone):
            with suppress(psutil.NoSuchProcess):
                left.kill()


def of(clone: Path) -> list[psutil.Process]:
    """Processes that run from the clone or in its home."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(clone) in part for part in process.info["cmdline"] or [])
    ]


async def output(process: asyncio.subprocess.Process) -> str:
    said, _ = await process.communicate()
    return said.decode()


async def test_the_demo_from_a_fresh_clone(clone: Path) -> None:
    async with ctl(clone, "demo", "--once") as process:
        said = await output(process)
    assert process.returncode == 0, said
    assert "smollm2 is serving: 1 replica on" in said
    assert re.search(r"^smollm2: +\S", said, re.MULTILINE), said
    for step in ("registry", "mirror", "check", "catalog", "placement", "smoke test"):
        assert re.search(rf"^✓ {step}: done in ", said, re.MULTILINE), step
    lines = [re.sub(r"[│├└─⇢ ]+", " ", line).strip() for line in said.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("ctl demo "))
    names = [
        "ctl demo",
        "serve model",
        "registry",
        "mirror",
        "check",
        "catalog",
        "placement",
        "start replica",
        "send start",
        "start shard",
        "install engine",
        "fetch weights",
        "launch engine",
        "wait for engine",
    ]
    drawn = lines[start : lines.index("", start)]
    at = 0
    for name in names:
        at = next(number for number in range(at, len(drawn)) if drawn[number].startswith(name)) + 1
    assert re.match(r"[\d.]+ (ms|s|min \d+ s): \S", drawn[-1]), "the summary: all of the time, and where it went"
    spans = spans_in(clone / ".llmgw" / "traces")
    (demo,) = [span for span in spans.spans.values() if span.name == "ctl demo"]
    (root,) = tree(spans, demo.trace_id)
    before = [child.span.name for child in root.children]
    assert before[: before.index("serve model")] == ["start ctl", "start system", "get model", "connect", "start job"]
    assert "ask model" in before
    assert_whole(root)
    assert re.search(r"web UI: http://127\.0\.0\.1:\d+/", said)
    assert len(said.partition("try next:\n")[2].partition("\n\n")[0].splitlines()) == 3
    assert of(clone) == []
    assert (clone / ".llmgw" / "temporal.db").exists()


async def test_a_second_demo_sets_nothing_up_and_goes_on_from_what_is_there(clone: Path) -> None:
    async with ctl(clone, "demo") as process:
        said = await output(process)
        assert process.returncode == 0, said
        assert "setting up" not in said
        assert "already mirrored" in said
        # Each of these ends what is left when its block does, so they stand in one another.
        async with ctl(clone, "demo", "--once") as again:
            said = await output(again)
            assert again.returncode == 0, said
            assert said.splitlines()[-1] == "the system was up before: it stays up"
            async with ctl(clone, "status", "--json") as status:
                assert '"serving"' in await output(status)
                assert status.returncode == 0
                async with ctl(clone, "down") as down:
                    await output(down)
                    assert down.returncode == 0
                    assert of(clone) == []


async def test_ctrl_c_leaves_nothing_running(clone: Path) -> None:
    async with ctl(clone, "demo") as process:
        assert process.stdout is not None
        while b"node " not in (line := await asyncio.wait_for(process.stdout.readline(), 120)):
            assert line, "the demo ended first"
        os.killpg(process.pid, signal.SIGINT)
        await output(process)
        assert process.returncode == 130
        await until(lambda: of(clone) == [], 20.0)


async def test_an_explicit_port_that_is_taken_is_a_sentence(clone: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with ctl(clone, "up", LLMGW_PORT=str(port)) as process:
            said = await output(process)
        assert process.returncode == 1
        assert re.search(rf"port {port} for Temporal is taken by \S+ \(pid {os.getpid()}\)", said), said
    assert of(clone) == []

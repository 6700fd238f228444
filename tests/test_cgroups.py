"""Control groups: found where they are writable, and engines that cannot get out of theirs."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent import cgroups
from agent.cgroups import Cgroups, Hierarchy, hierarchies
from agent.engines.adapter import ExitStatus
from agent.layout import Layout
from agent.processes import alive, boot_id, mark
from agent.supervisor import Supervisor
from tests.waiting import until

HYBRID = """\
25 1 0:20 / /sys rw - sysfs sysfs rw
31 25 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 25 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
34 25 0:30 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
"""
HYBRID_OWN = "4:name=systemd:/user\n3:memory:/machine/a\n2:cpu,cpuacct:/\n0::/session\n"
ESCAPE = """
import os, signal, sys
if os.fork():
    signal.pause()
os.setsid()
if os.fork():
    os._exit(0)
os.execve(sys.executable, [sys.executable, "-c",
    "import os, signal, sys\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))\\n"
    "os.rename(sys.argv[1] + '.new', sys.argv[1])\\n"
    "signal.pause()", sys.argv[1]], {})
"""
"""A child in a session of its own, whose parent is gone and whose environment is empty."""


def test_the_places_of_a_machine_with_both_versions() -> None:
    assert hierarchies(HYBRID, HYBRID_OWN) == (
        Hierarchy(frozenset(), Path("/sys/fs/cgroup/unified/session")),
        Hierarchy(frozenset({"cpu", "cpuacct"}), Path("/sys/fs/cgroup/cpu,cpuacct")),
        Hierarchy(frozenset({"memory"}), Path("/sys/fs/cgroup/memory/machine/a")),
    )


def test_the_place_in_a_container_is_beneath_what_is_mounted() -> None:
    mounts = "31 25 0:27 /docker/a /sys/fs/cgroup ro - cgroup2 cgroup rw,nsdelegate\n"
    assert hierarchies(mounts, "0::/docker/a/engine\n") == (Hierarchy(frozenset(), Path("/sys/fs/cgroup/engine")),)
    assert hierarchies(mounts, "0::/docker/ab\n") == ()
    assert hierarchies(mounts, "0::/../b\n") == ()
    assert hierarchies(mounts.replace("/sys/fs/cgroup", "/c\\040g"), "0::/docker/a\n")[0].own == Path("/c g")


def test_without_the_right_to_make_one_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Cgroups((tmp_path / "file", tmp_path / "absent" / "deep"), tmp_path).make("tiny-0.0-1-1") == ()
    assert Cgroups((), tmp_path).make("tiny-0.0-1-1") == ()


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    groups = Cgroups.here(tmp_path)
    probe = groups.make("probe")
    cgroups.remove(probe)
    if not probe:
        pytest.skip("this machine lets us make no control group")
    made = Supervisor(Layout(tmp_path), groups)
    yield made
    for stem in made.running_launches():
        found = made.find(stem)
        if found is not None:
            await made.stop(found, 0)
    groups.sweep()


@pytest.mark.parametrize("shim_is_killed", [False, True])
async def test_nothing_gets_away(supervisor: Supervisor, tmp_path: Path, shim_is_killed: bool) -> None:
    """Not even what left session, parent and environment behind, while nobody was there to become its parent."""
    stem = str(tmp_path / "logs" / "tiny-0.0" / "1-1")
    process = await supervisor.launch(stem, [sys.executable, "-c", ESCAPE, f"{tmp_path}/loner"], {})
    pid = await until(lambda: int((tmp_path / "loner").read_text()) if (tmp_path / "loner").exists() else 0)
    loner = mark(pid)
    assert loner is not None
    assert Path(f"/proc/{pid}/environ").read_bytes().find(b"LLMGW_RUN") == -1
    if shim_is_killed:
        os.kill(process.shim.pid, signal.SIGKILL)
        await until(lambda: not alive(process.engine, boot_id()))
        assert alive(loner, boot_id()), "no parent, no session and no environment lead to it"
    assert loner in supervisor.members(process)
    await supervisor.stop(process, 0.1)
    assert not alive(loner, boot_id())
    assert not any(Path(group).exists() for group in process.cgroups)


async def test_a_group_goes_with_its_engine_also_without_an_agent(supervisor: Supervisor, tmp_path: Path) -> None:
    stem = str(tmp_path / "logs" / "tiny-0.0" / "1-1")
    process = await supervisor.launch(stem, [sys.executable, "-c", "input()"], {})
    assert process.cgroups
    await until(lambda: supervisor.ended(process))
    await until(lambda: not any(Path(group).exists() for group in process.cgroups))


async def test_empty_groups_of_a_crash_are_swept_and_others_stay(supervisor: Supervisor, tmp_path: Path) -> None:
    stem = str(tmp_path / "logs" / "tiny-0.0" / "1-1")
    process = await supervisor.launch(stem, [sys.executable, "-c", "import signal; signal.pause()"], {})
    left = Cgroups.here(tmp_path).make("old-0.0-1-1")
    other = Cgroups.here(tmp_path / "another node").make("old-0.0-1-1")
    try:
        supervisor.sweep()
        assert not any(Path(group).exists() for group in left)
        assert all(Path(group).exists() for group in (*process.cgroups, *other))
    finally:
        cgroups.remove(other)


async def test_an_engine_the_kernel_ends_for_want_of_memory_is_told_from_one_that_was_killed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    stem = str(tmp_path / "logs" / "tiny-0.0" / "1-1")
    grow = "import sys, time\nsys.stdin.read(0)\nx = bytearray(2**28)\nfor i in range(0, 2**28, 4096): x[i] = 1"
    limited = next((place for place in Cgroups.here(tmp_path).make("limit") if _limit(Path(place), 64 * 2**20)), None)
    if limited is None:
        pytest.skip("no control group of this machine counts memory")
    try:
        within = Supervisor(Layout(tmp_path), Cgroups((Path(limited),), tmp_path))
        process = await within.launch(stem, [sys.executable, "-c", grow], {})
        assert await until(lambda: within.ended(process), 30) == ExitStatus(signal=9, oom=True)
        other = await within.launch(f"{stem}0", [sys.executable, "-c", "import signal; signal.pause()"], {})
        os.kill(other.engine.pid, signal.SIGKILL)
        assert await until(lambda: within.ended(other)) == ExitStatus(signal=9, oom=False)
    finally:
        cgroups.remove(Cgroups.here(tmp_path).make("limit"))


def _limit(group: Path, size: int) -> bool:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group / name).exists():
            (group / name).write_text(str(size))
            return True
    return False


async def test_engines_are_the_first_to_go_when_the_machine_has_no_memory_left(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    stem = str(tmp_path / "logs" / "tiny-0.0" / "1-1")
    process = await supervisor.launch(stem, [sys.executable, "-c", "import signal; signal.pause()"], {})
    assert Path(f"/proc/{process.engine.pid}/oom_score_adj").read_text() == "500\n"
    assert Path(f"/proc/{process.shim.pid}/oom_score_adj").read_text() != "500\n"

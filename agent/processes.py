"""Which process is which: marks that are never reused, trees of them, and signals that hit the right one.

A pid alone is reused by the kernel; with the boot id and the start time in clock ticks it names one process for ever.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet.records import Record

PROC = Path("/proc")


class Mark(Record):
    """Names one process for ever."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True)
class Stat:
    """What `/proc/<pid>/stat` says that matters here."""

    state: str
    parent: int
    session: int
    start_ticks: int


def boot_id() -> str:
    """Differs after each boot of this machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def stat(pid: int) -> Stat | None:
    """None where there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name in parentheses may hold blanks and parentheses itself, so count from the last one
    fields = text.rpartition(")")[2].split()
    return Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def mark(pid: int) -> Mark | None:
    """The mark of the process that has this pid now; None where it has ended."""
    found = stat(pid)
    return Mark(pid=pid, start_ticks=found.start_ticks, boot_id=boot_id()) if found is not None else None


def alive(process: Mark, boot: str) -> bool:
    """Whether exactly this process runs; a zombie does not. `boot` is this boot's id."""
    found = stat(process.pid)
    if process.boot_id != boot or found is None or found.start_ticks != process.start_ticks:
        return False
    return found.state not in "ZX"


def command_name(pid: int) -> str:
    """What the process calls itself, as `ps` shows it; empty where it has ended."""
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def reap(process: Mark) -> None:
    """Give the pid of an ended child of ours back to the kernel; a child of another's is left to that one."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def send(process: Mark, number: signal.Signals, boot: str) -> bool:
    """Signal exactly this process; False where it has ended."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # Asked after the handle is open: from here on the handle and the answer mean the same process.
        if not alive(process, boot):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def family(roots: Iterable[Mark], variable: str, value: str) -> set[Mark]:
    """The processes of one launch that run now.

    Those are the roots, their descendants, the rest of the sessions that a root leads or led, and whoever carries
    `variable=value` in its environment: one of them finds a process that left its session and lost its parent,
    another one that overwrote its environment.
    """
    boot = boot_id()
    table = {pid: found for pid in pids() if (found := stat(pid)) is not None and found.state not in "ZX"}
    known = [root for root in roots if root.boot_id == boot]
    living = {root.pid for root in known if root.pid in table and table[root.pid].start_ticks == root.start_ticks}
    # A session's number is not given out again while anybody is left in it, unless it had emptied before.
    sessions = {root.pid for root in known if root.pid in living or root.pid not in table}
    needle = f"{variable}={value}".encode()
    members = set(living)
    members |= {
        pid for pid, found in table.items() if (found.session in sessions and owned(pid)) or carries(pid, needle)
    }
    while True:
        more = {pid for pid, found in table.items() if found.parent in members} - members
        if not more:
            break
        members |= more
    return {Mark(pid=pid, start_ticks=table[pid].start_ticks, boot_id=boot) for pid in members}


def pids() -> list[int]:
    """All of this machine's."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()]


def owned(pid: int) -> bool:
    """Whether the process runs as this user."""
    try:
        return (PROC / str(pid)).stat().st_uid == os.geteuid()
    except OSError:
        return False


def carries(pid: int, needle: bytes) -> bool:
    """Whether the process was started with exactly this `NAME=value` in its environment."""
    return needle in environment(pid)


def environment(pid: int) -> list[bytes]:
    """What a process was started with; empty where that cannot be read."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def own_memory(pid: int) -> int:
    """Bytes of RAM only this process's end gives back: anonymous and shared pages.

    Mapped files (weights) are left out: they are page cache, and the kernel counts them as available.
    """
    return sum(_kept(pid, "RssAnon", "RssShmem"))


def resident(pids: Iterable[int]) -> int:
    """Bytes of RAM these processes of one engine hold together, mapped weights too.

    Pages of files that several of them map, such as PyTorch's libraries, are counted once: as the most that one maps.
    """
    own, mapped = 0, 0
    for pid in pids:
        anonymous, shared, files = _kept(pid, "RssAnon", "RssShmem", "RssFile")
        own += anonymous + shared
        mapped = max(mapped, files)
    return own + mapped


def _kept(pid: int, *names: str) -> list[int]:
    """Bytes of these rows of `/proc/<pid>/status`; 0 where the process has ended."""
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [0] * len(names)
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return [int(rows.get(name, "0 kB").split()[0]) * 1024 for name in names]

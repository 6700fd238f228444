"""Detached processes: start one, know it again by pid and start time, and end it with everything below it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from fleet.records import Record

POLL_S = 0.05
KILL_WAIT_S = 5.0
"""After KILL: only a process stuck in the kernel takes longer, and no waiting helps then."""


class ProcessRecord(Record):
    """A process that was started, as `run/<name>.json` keeps it."""

    name: str
    pid: int
    ticks: int
    """Start time in clock ticks since boot: with the pid and the boot it names one process for ever."""
    boot: str
    log: Path
    log_offset: int = 0
    """Where this process's own lines begin in its log."""

    @property
    def alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        return boot_id() == self.boot and start_ticks(self.pid) == self.ticks

    def last_lines(self, count: int = 5) -> list[str]:
        """The end of what this process wrote."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_offset, self.log.stat().st_size - 64 * 1024))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def boot_id() -> str:
    """Of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """The start time of a process that runs; None where there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses, and may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def spawn(name: str, command: list[str], *, log: Path, cwd: Path, environment: Mapping[str, str]) -> ProcessRecord:
    """Start a process in a session of its own, so that neither a closed terminal nor Ctrl-C reaches it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        offset = out.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
    ticks = start_ticks(process.pid)  # it cannot be reaped before the thread below waits for it
    # Reaps it when it dies while we still run.
    threading.Thread(target=process.wait, name=f"reap {name}", daemon=True).start()
    return ProcessRecord(
        name=name, pid=process.pid, ticks=-1 if ticks is None else ticks, boot=boot_id(), log=log, log_offset=offset
    )


async def stop(record: ProcessRecord, grace_s: float) -> bool:
    """TERM, wait, KILL, for this process and what it leaves behind. False where it did not run."""
    if not record.alive:
        return False
    family = _descendants(record.pid)
    _signal(record.pid, record.ticks, signal.SIGTERM)
    ended = await _gone({record.pid: record.ticks}, grace_s)
    if not ended:
        family |= _descendants(record.pid)  # of a process that would not go: what it started since
        _signal(record.pid, record.ticks, signal.SIGKILL)
    await _end(family, 0.0)
    await _gone({record.pid: record.ticks}, KILL_WAIT_S)
    return True


async def sweep(ours: Callable[[Mapping[str, str]], bool], grace_s: float) -> int:
    """End every process whose environment says that it is ours, such as an engine whose agent was killed.

    Returns how many there were. Never ends this process, whatever its environment is.
    """
    found = _marked(ours)
    await _end(found, grace_s)
    return len(found)


def holder_of(port: int, host: str = "127.0.0.1") -> str:
    """Who keeps us from listening on a port, such as "temporal (pid 123)"; empty where it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not hold a port
        try:
            probe.bind((host, port))
        except PermissionError:
            return "the system (ports below 1024 need root)"
        except OSError:
            return _listener(port)
    return ""


def listens(record: ProcessRecord, port: int) -> bool:
    """Whether this very process, or one that it started, listens on a port: who answers there may be another."""
    with contextlib.suppress(psutil.Error, OSError):
        ours = psutil.Process(record.pid)
        for process in (ours, *ours.children(recursive=True)):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                    return True
    return False


def _listener(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
                continue
            if connection.laddr.port == port:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process"


def _descendants(pid: int) -> dict[int, int]:
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return {}
    return _identified(child.pid for child in children)


def _marked(ours: Callable[[Mapping[str, str]], bool]) -> dict[int, int]:
    found: dict[int, int] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            ticks = start_ticks(process.pid)
            if process.pid != os.getpid() and ticks is not None and ours(process.environ()):
                found[process.pid] = ticks
    return found


def _identified(pids: Iterable[int]) -> dict[int, int]:
    return {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}


async def _end(family: dict[int, int], grace_s: float) -> None:
    if grace_s > 0:
        for pid, ticks in family.items():
            _signal(pid, ticks, signal.SIGTERM)
        if await _gone(family, grace_s):
            return
    for pid, ticks in family.items():
        _signal(pid, ticks, signal.SIGKILL)
    await _gone(family, KILL_WAIT_S)


def _signal(pid: int, ticks: int, number: signal.Signals) -> None:
    if start_ticks(pid) == ticks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _gone(family: Mapping[int, int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(start_ticks(pid) == ticks for pid, ticks in family.items()):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True

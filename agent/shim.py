"""Stands between agent and engine so that the engine's end is known, and whole, also when no agent was there to see it.

Run by path with the standard library only: `python -I -S shim.py STEM [CGROUP…] -- COMMAND…`. It starts the command in
those control groups, writes both process ids to `STEM.pid`, keeps the command's output in bounded logs, passes SIGTERM
and SIGINT on, and when the command has ended kills what it left behind, writes how it ended to `STEM.exit`, and ends.

The output is `STEM.log` up to SEGMENT_BYTES, and what follows `STEM.log.<offset>`, named by where it begins: the
beginning, where a cause often stands, and the last KEPT_SEGMENTS stay.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127
"""The shell's code for a command that cannot be run."""
SEGMENT_BYTES = 4 * 1024 * 1024
"""An hour of an engine that logs each of five requests a second; with KEPT_SEGMENTS at most 12 MiB for a launch."""
KEPT_SEGMENTS = 2
"""Beside the beginning. Two, so that after a rotation there still is a whole one to read."""
CHUNK_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024
"""What an engine may write before it has to wait for the disk."""
LAST_WORDS_S = 2.0
"""For the rest of the output, once all of the engine's processes are gone."""
OOM_SCORE = "500"
"""As much as half of the machine's memory: when that runs out, an engine goes before the agent, Temporal or sshd."""


def main(arguments: list[str]) -> int:
    """Run the command to its end."""
    split = arguments.index("--")
    stem, cgroups, command = arguments[0], arguments[1:split], arguments[split + 1 :]
    libc = ctypes.CDLL(None)
    # Processes whose parent dies become ours, so that none of the engine's can get out of sight.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mask = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, mask)

    def in_child() -> None:
        # A killed shim must not leave an engine that nobody waits for.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for cgroup in cgroups:
            put(f"{cgroup}/cgroup.procs", "0")
        put("/proc/self/oom_score_adj", OOM_SCORE)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, mask)

    output, engines_end = os.pipe()
    with contextlib.suppress(OSError):  # a user with many pipes gets no larger one
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    before = oom_kills(cgroups)
    try:
        # This process has one thread so far, so code between fork and exec is safe here.
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=engines_end,
            stderr=engines_end,
            cwd=Path(stem).parent,  # not the agent's: `python -m` would import modules that lie there
            preexec_fn=in_child,
        )
    except OSError as error:
        sys.stderr.write(f"llmgw: {command[0]} cannot be started: {error.strerror}\n")
        write(f"{stem}.exit", {"code": NOT_STARTED, "signal": None})
        remove(cgroups)
        return NOT_STARTED
    os.close(engines_end)
    # With the signals still blocked, so that they come to this thread and not to that one.
    pump = threading.Thread(target=keep, args=(output, Log(f"{stem}.log")), daemon=True)
    pump.start()
    for number in mask:
        signal.signal(number, lambda received, _: pass_on(engine.pid, received))
    pids = {"shim": identity(os.getpid()), "engine": identity(engine.pid)}
    write(f"{stem}.pid", {**pids, "boot_id": boot_id(), "cgroups": cgroups})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, mask)
    status = wait_for(engine.pid)
    end_rest()
    pump.join(LAST_WORDS_S)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if ended_by else os.waitstatus_to_exitcode(status)
    write(f"{stem}.exit", {"code": code, "signal": ended_by, "oom": oom_kills(cgroups) > before})
    remove(cgroups)
    engine.returncode = 0  # it was waited for here; Popen must not wait again
    return 0


class Log:
    """A launch's output on the disk, never more than a few segments of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._offset = 0
        """Of the segment that is written to."""
        self._later: list[str] = []
        self._lost = 0
        """Bytes that could not be written since the last that could."""

    def write(self, data: bytes) -> None:
        """Keep it. What a full disk does not take is counted and said later: an engine never waits for a disk."""
        try:
            if self._lost:
                self._put(f"\nllmgw: {self._lost} bytes of output are lost here: the disk was full\n".encode())
                self._lost = 0
            while data:
                if self._size >= SEGMENT_BYTES:
                    self._next()
                room = SEGMENT_BYTES - self._size
                self._put(data[:room])
                data = data[room:]
        except OSError:
            self._lost += len(data)

    def _put(self, data: bytes) -> None:
        while data:
            written = os.write(self._fd, data)
            self._size += written
            data = data[written:]

    def _next(self) -> None:
        offset = self._offset + self._size
        path = f"{self._path}.{offset}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.close(self._fd)
        self._fd, self._size, self._offset = fd, 0, offset
        self._later.append(path)
        for old in self._later[:-KEPT_SEGMENTS]:
            Path(old).unlink(missing_ok=True)
        self._later = self._later[-KEPT_SEGMENTS:]
        self._link(path)

    def _link(self, path: str) -> None:
        """Let `latest` lead to what is written now, if it led to this launch."""
        link = Path(path).with_name("latest")
        with contextlib.suppress(OSError):  # a convenience for people
            if link.readlink().name.startswith(Path(self._path).name):
                partial = link.with_name(".latest")
                partial.unlink(missing_ok=True)
                partial.symlink_to(Path(path).name)
                partial.replace(link)


def keep(output: int, log: Log) -> None:
    """Take what the engine writes until nobody is left who could."""
    while chunk := os.read(output, CHUNK_BYTES):
        log.write(chunk)


def put(path: str, text: str) -> None:
    """Write into a file of the kernel's; where that is not allowed, it stays as it is."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def pass_on(pid: int, number: int) -> None:
    """Give a signal to the engine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def identity(pid: int) -> dict[str, int]:
    """The pid with its start time in clock ticks since boot: field 22 of its stat, the name may hold blanks."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return {"pid": pid, "start_ticks": int(fields[19])}


def boot_id() -> str:
    """Differs after each boot of this machine, where the same pids and start times may come again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def wait_for(engine: int) -> int:
    """The engine's wait status; children that came to us by the death of their parent are taken on the way."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == engine:
            return status


def oom_kills(cgroups: list[str]) -> int:
    """Processes the kernel has ended for want of memory: in the control groups where they count that, else in all."""
    counts = [counted(f"{cgroup}/{file}") for cgroup in cgroups for file in ("memory.events", "memory.oom_control")]
    found = [count for count in counts if count is not None]
    return max(found) if found else counted("/proc/vmstat") or 0


def counted(path: str) -> int | None:
    """The number in the line `oom_kill`; None where there is no such file or line."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def end_rest() -> None:
    """Kill every process the engine left; each killed one may hand us its own children, so until there is none."""
    while True:
        for pid in children():
            pass_on(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Pids of this process's children."""
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        return [int(pid) for pid in task.read_text(encoding="utf-8").split()]
    found = []  # a kernel without that file
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


def remove(cgroups: list[str]) -> None:
    """The control groups, which are empty now."""
    for cgroup in cgroups:
        with contextlib.suppress(OSError):
            Path(cgroup).rmdir()


def write(path: str, value: dict[str, object]) -> None:
    """Let a JSON file appear whole."""
    partial = Path(f"{path}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Stands between agent and engine so that the engine's end is known, and whole, also when no agent was there to see it.

Run by path with the standard library only: `python -I -S shim.py STEM COMMAND…`. It starts the command, writes both
process ids to `STEM.pid`, passes SIGTERM and SIGINT on, and when the command has ended kills what it left behind,
writes how it ended to `STEM.exit`, and ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127
"""The shell's code for a command that cannot be run."""


def main(arguments: list[str]) -> int:
    """Run the command to its end."""
    stem, command = arguments[0], arguments[1:]
    libc = ctypes.CDLL(None)
    # Processes whose parent dies become ours, so that none of the engine's can get out of sight.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mask = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, mask)

    def in_child() -> None:
        # A killed shim must not leave an engine that nobody waits for.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, mask)

    try:
        # This process has one thread, so code between fork and exec is safe here.
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    except OSError as error:
        sys.stderr.write(f"llmgw: {command[0]} cannot be started: {error.strerror}\n")
        write(f"{stem}.exit", {"code": NOT_STARTED, "signal": None})
        return NOT_STARTED
    for number in mask:
        signal.signal(number, lambda received, _: pass_on(engine.pid, received))
    before = oom_kills()
    write(f"{stem}.pid", {"shim": identity(os.getpid()), "engine": identity(engine.pid)})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, mask)
    status = wait_for(engine.pid)
    end_rest()
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = None if ended_by else os.waitstatus_to_exitcode(status)
    write(f"{stem}.exit", {"code": code, "signal": ended_by, "oom": oom_kills() > before})
    engine.returncode = 0  # it was waited for here; Popen must not wait again
    return 0


def pass_on(pid: int, number: int) -> None:
    """Give a signal to the engine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def identity(pid: int) -> dict[str, int]:
    """The pid with its start time in clock ticks since boot: field 22 of its stat, the name may hold blanks."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return {"pid": pid, "start_ticks": int(fields[19])}


def wait_for(engine: int) -> int:
    """The engine's wait status; children that came to us by the death of their parent are taken on the way."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == engine:
            return status


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory since boot; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


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

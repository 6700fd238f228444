"""Engine processes: started so that they outlive the agent, found again, ended with everything they started.

Each launch has its files in `<data>/logs/<replica>.<rank>/`, named `<generation>-<attempt>`:

    7-1.log    standard output and error of the engine, from the beginning
    7-1.log.N  the same from byte N on, where it is long; the shim keeps the beginning and the end
    7-1.pid    JSON: pid and start time of the shim and of the engine, the boot's id, and their control groups
    7-1.exit   JSON: exit code or signal, written by the shim when the engine ended
    latest     a link to what the newest launch writes now
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from activities.node_contract import ShardRef
from agent import cgroups
from agent.cgroups import Cgroups
from agent.engines.adapter import ExitStatus
from agent.layout import Layout
from agent.processes import (
    Mark,
    alive,
    boot_id,
    carries,
    command_name,
    environment,
    family,
    mark,
    pids,
    reap,
    send,
    stat,
)
from fleet.reasons import Reason, StepError
from fleet.records import Record
from runtime import engine_logs

logger = logging.getLogger(__name__)

SHIM = Path(__file__).with_name("shim.py")
RUN_VARIABLE = "LLMGW_RUN"
"""In the environment of everything a launch starts: the path of its files without suffix."""
NOTE_VARIABLE = "LLMGW_NOTE"
"""In the same environment: what the agent wants to know again if its ledger is lost."""
POLL_S = 0.05
PID_WAIT_S = 10.0
"""From spawn to the shim's `.pid` file: 30 ms on an idle machine."""
KILL_WAIT_S = 15.0
"""From KILL to gone: a process that returns tens of GiB to the kernel needs seconds."""
SHIM_END_S = 1.0
"""For the shim to write down how the engine ended, once it is alone: it needs milliseconds."""
TAIL_BYTES = 512 * 1024
"""The cause of a failed start can stand far above the last line."""
HEAD_BYTES = 128 * 1024
"""Of a start that wrote more than that: its first complaints."""
KEPT_LAUNCHES = 10
SHARD_BYTES = 64 * 1024**2
"""Logs of at most so many launches of a shard stay, with so many bytes: five launches that wrote without end."""
NODE_LAUNCHES = 1000
"""Of all shards, also those long gone: each launch is three files or more."""

_INHERITED = re.compile(
    r"(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH"
    r"|(CUDA|NVIDIA|NCCL|GLOO|HIP|ROCR|HSA|OMP|MKL|KMP|OPENBLAS|GGML|VLLM|SGLANG|TORCH|XDG)_\w+)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)


class EngineProcess(Record):
    """One launch."""

    stem: str
    """Path of its files, without suffix."""
    engine: Mark
    shim: Mark
    cgroups: tuple[str, ...] = ()
    """Directories of the control groups that hold the engine and all it starts; empty where there are none."""


class Supervisor:
    """Starts, finds and ends engine processes; keeps nothing in memory."""

    def __init__(
        self, layout: Layout, groups: Cgroups | None = None, *, kill_wait_s: float = KILL_WAIT_S, log_bytes: int = 2**29
    ) -> None:
        """`log_bytes` is what the logs of all launches of the node may take."""
        self._layout = layout
        self._boot = boot_id()
        self._groups = groups or Cgroups.here(layout.data)
        self._kill_wait_s = kill_wait_s
        self._log_bytes = log_bytes

    def next_stem(self, shard: ShardRef) -> str:
        """A name for the files of the next launch, and room for them: the oldest launches' files go."""
        directory = self._layout.shard_logs(shard)
        same = [one.attempt for one in engine_logs.launches(directory) if one.generation == shard.generation]
        self.make_room(directory)
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory / f"{shard.generation}-{max(same, default=0) + 1}")

    def make_room(self, shard: Path | None = None) -> None:
        """Remove the oldest logs where there are too many, of this shard's directory and of the node."""
        if shard is not None:
            ended = [launch for launch in engine_logs.launches(shard) if not self._is_running(launch)]
            for launch in engine_logs.too_many(ended, KEPT_LAUNCHES - 1, SHARD_BYTES):
                engine_logs.forget(launch)
        ended = [
            launch
            for directory in self.shard_directories()
            for launch in engine_logs.launches(directory)
            if not self._is_running(launch)
        ]
        for launch in engine_logs.too_many(ended, NODE_LAUNCHES, self._log_bytes):
            engine_logs.forget(launch)

    def shard_directories(self) -> list[Path]:
        """Where the launches of each shard have their files, those of shards long gone too."""
        return sorted(self._layout.logs.glob("*"))

    def _is_running(self, launch: engine_logs.LaunchLog) -> bool:
        found = self.find(str(launch.stem))
        return found is not None and self.ended(found) is None

    def sweep(self) -> None:
        """Remove the empty control groups that launches of earlier agents left."""
        self._groups.sweep()

    async def launch(
        self, stem: str, command: Sequence[str], variables: Mapping[str, str], note: str = ""
    ) -> EngineProcess:
        """Start a command in a session of its own; its output goes to `<stem>.log`.

        Returns when the engine's pid is known; the engine may have ended by then. Cancelling ends what was started.
        """
        shim = self._spawn(stem, command, {**variables, RUN_VARIABLE: stem, NOTE_VARIABLE: note})
        try:
            return await self._started(stem, shim)
        except asyncio.CancelledError:
            await self.stop(EngineProcess(stem=stem, shim=shim, engine=shim), 0)
            raise

    def _spawn(self, stem: str, command: Sequence[str], variables: Mapping[str, str]) -> Mark:
        log = Path(f"{stem}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        groups = self._groups.make(f"{log.parent.name}-{log.stem}")
        # Not subprocess: its objects want to be waited for by the process that made them, and this one may end first.
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(SHIM), stem, *groups, "--", *command],
            {**engine_environment(os.environ), **variables},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
        )
        _link(log.parent / "latest", log.name)
        return mark(pid) or Mark(pid=pid, start_ticks=0, boot_id=self._boot)

    async def _started(self, stem: str, shim: Mark) -> EngineProcess:
        deadline = time.monotonic() + PID_WAIT_S
        while time.monotonic() < deadline:
            gone = not alive(shim, self._boot)
            found = self.find(stem)
            if found is not None:
                return found
            if gone:  # the command could not be run
                return EngineProcess(stem=stem, shim=shim, engine=shim)
            await asyncio.sleep(0.01)
        await self.stop(EngineProcess(stem=stem, shim=shim, engine=shim), 0)
        raise StepError(Reason.INTERNAL, f"the engine's shim did not start within {PID_WAIT_S:.0f} s: see {stem}.log")

    def find(self, stem: str) -> EngineProcess | None:
        """The launch that wrote its pids for this name on this boot, whether it still runs or not."""
        try:
            said = json.loads(Path(f"{stem}.pid").read_text(encoding="utf-8"))
            if said.get("boot_id", self._boot) != self._boot:  # a shim of an older llmgw wrote none
                return None
            shim, engine = (Mark(**said[name], boot_id=self._boot) for name in ("shim", "engine"))
            return EngineProcess(stem=stem, shim=shim, engine=engine, cgroups=tuple(said.get("cgroups", ())))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    async def launched(self, stem: str) -> EngineProcess | None:
        """The launch of this name; one whose shim has not written its pids yet is waited for. None where none was."""
        deadline = time.monotonic() + PID_WAIT_S
        while True:
            starting = self._carriers(stem)  # asked first: it may write them in between
            found = self.find(stem)
            if found is not None or not starting:
                return found
            if time.monotonic() > deadline:
                return EngineProcess(stem=stem, shim=starting[0], engine=starting[0])
            await asyncio.sleep(POLL_S)

    def _carriers(self, stem: str) -> list[Mark]:
        """What runs of this launch by its environment alone, the oldest first."""
        needle = f"{RUN_VARIABLE}={stem}".encode()
        marks = [found for pid in pids() if carries(pid, needle) and (found := mark(pid)) is not None]
        return sorted((one for one in marks if alive(one, self._boot)), key=lambda one: one.start_ticks)

    def running_launches(self) -> dict[str, str]:
        """Names of the launches beneath this node's directory that run, with their notes: from /proc alone."""
        found: dict[str, str] = {}
        beneath = f"{self._layout.logs}/"
        for pid in pids():
            entry = dict(part.decode(errors="replace").partition("=")[::2] for part in environment(pid) if b"=" in part)
            process = stat(pid)
            if entry.get(RUN_VARIABLE, "").startswith(beneath) and process is not None and process.state not in "ZX":
                found[entry[RUN_VARIABLE]] = entry.get(NOTE_VARIABLE, "")
        return found

    def ended(self, process: EngineProcess) -> ExitStatus | None:
        """How the engine ended; None while it runs."""
        shim_alive = alive(process.shim, self._boot)  # asked first: it writes the file before it ends
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(Path(f"{process.stem}.exit").read_text(encoding="utf-8"))
            return ExitStatus(code=said["code"], signal=said["signal"], oom=bool(said.get("oom")))
        if shim_alive:
            return None
        if process.shim.boot_id != self._boot:
            return ExitStatus(note="the machine was restarted")
        return ExitStatus(note="its shim was killed")

    async def stop(self, process: EngineProcess, grace_s: float, seen: set[Mark] | None = None) -> bool:
        """End the engine with everything it started; returns whether it had to be killed.

        TERM goes to the engine alone, which knows its children; after the grace KILL goes to all. Returns when all
        are gone. Stopping what is gone succeeds. Raises StepError(NODE_QUARANTINED) where a process does not go.
        Every process that is found on the way is added to `seen`.
        """
        if grace_s > 0 and send(process.engine, signal.SIGTERM, self._boot):
            await self._gone_within(process.engine, grace_s)
        killed = alive(process.engine, self._boot)
        deadline = time.monotonic() + self._kill_wait_s
        shim_until = 0.0
        while left := self.members(process):
            now = time.monotonic()
            rest = left - {process.shim}
            if seen is not None:
                seen |= left
            if now > deadline:
                one = min(rest or left, key=lambda member: member.pid)
                raise StepError(Reason.NODE_QUARANTINED, f"pid {one.pid} ({command_name(one.pid)}) outlives KILL")
            if rest:
                # Not the shim: while it lives, whoever loses its parent becomes its child and is found.
                cgroups.kill(process.cgroups)
                for member in rest:
                    send(member, signal.SIGKILL, self._boot)
                shim_until = 0.0
            elif not shim_until:
                shim_until = now + SHIM_END_S
            elif now > shim_until:
                send(process.shim, signal.SIGKILL, self._boot)
            await asyncio.sleep(POLL_S / 5)
        reap(process.shim)
        cgroups.remove(process.cgroups)
        return killed

    async def _gone_within(self, process: Mark, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while alive(process, self._boot):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(POLL_S, left))

    def members(self, process: EngineProcess) -> set[Mark]:
        """Everything of this launch that runs, the shim too."""
        roots = {process.shim, process.engine}
        held = cgroups.inside(process.cgroups) if process.shim.boot_id == self._boot else set[int]()
        roots |= {found for pid in held if (found := mark(pid)) is not None}
        return {one for one in family(roots, RUN_VARIABLE, process.stem) if alive(one, self._boot)}

    def runs(self, process: EngineProcess) -> bool:
        """Whether the engine itself runs."""
        return alive(process.engine, self._boot) and self.ended(process) is None

    def tail(self, stem: str) -> str:
        """The end of what it wrote."""
        return engine_logs.launch_of(stem).tail(TAIL_BYTES).decode("utf-8", errors="replace")

    def output(self, stem: str) -> str:
        """What it wrote; of very much only the beginning and the end."""
        log = engine_logs.launch_of(stem)
        tail = log.tail(TAIL_BYTES)
        head = log.head(HEAD_BYTES) + b"\n" if log.size() > len(tail) else b""
        return (head + tail).decode("utf-8", errors="replace")


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine gets of the agent's environment: what it needs to run, and no secret.

    Weights are on the disk, so nothing on a hub is asked for.
    """
    kept = {name: value for name, value in environ.items() if _INHERITED.fullmatch(name) and not _SECRET.search(name)}
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _link(link: Path, target: str) -> None:
    partial = link.with_name(".latest")
    with contextlib.suppress(OSError):  # a convenience for people: no start fails for it
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        partial.replace(link)

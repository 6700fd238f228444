"""Engine processes: started so that they outlive the agent, found again, ended with everything they started.

Each launch has its files in `<data>/logs/<replica>.<rank>/`, named `<generation>-<attempt>`:

    7-1.log    standard output and error of the engine
    7-1.pid    JSON: pid and start time of the shim and of the engine
    7-1.exit   JSON: exit code or signal, written by the shim when the engine ended
    latest     a link to the newest `.log`
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
from agent.engines.adapter import ExitStatus
from agent.layout import Layout
from agent.processes import Mark, alive, boot_id, environment, family, mark, pids, reap, send, stat
from fleet.reasons import Reason, StepError
from fleet.records import Record

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
KEPT_LAUNCHES = 10
"""Logs of this many launches of a shard stay."""

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


class Supervisor:
    """Starts, finds and ends engine processes; keeps nothing in memory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._boot = boot_id()

    def next_stem(self, shard: ShardRef) -> str:
        """A name for the files of the next launch, and room for it: the oldest launches' files go."""
        directory = self._layout.shard_logs(shard)
        directory.mkdir(parents=True, exist_ok=True)
        logs = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
        attempts = [_attempt(log) for log in logs if log.stem.partition("-")[0] == str(shard.generation)]
        for old in logs[: -KEPT_LAUNCHES + 1]:
            for suffix in (".log", ".pid", ".exit"):
                old.with_suffix(suffix).unlink(missing_ok=True)
        return str(directory / f"{shard.generation}-{max(attempts, default=0) + 1}")

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
        # Not subprocess: its objects want to be waited for by the process that made them, and this one may end first.
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(SHIM), stem, *command],
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
            shim, engine = (Mark(**said[name], boot_id=self._boot) for name in ("shim", "engine"))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return EngineProcess(stem=stem, shim=shim, engine=engine)

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

    async def stop(self, process: EngineProcess, grace_s: float) -> bool:
        """End the engine with everything it started; returns whether it had to be killed.

        TERM goes to the engine alone, which knows its children; after the grace KILL goes to all. Returns when all
        are gone. Stopping what is gone succeeds. Raises StepError(INTERNAL) where a process does not go.
        """
        if grace_s > 0 and send(process.engine, signal.SIGTERM, self._boot):
            await self._gone_within(process.engine, grace_s)
        killed = alive(process.engine, self._boot)
        deadline = time.monotonic() + KILL_WAIT_S
        shim_until = 0.0
        while left := self.members(process):
            now = time.monotonic()
            if now > deadline:
                raise StepError(Reason.INTERNAL, f"process {min(left, key=lambda one: one.pid).pid} outlives KILL")
            rest = left - {process.shim}
            if rest:
                # Not the shim: while it lives, whoever loses its parent becomes its child and is found.
                for member in rest:
                    send(member, signal.SIGKILL, self._boot)
                shim_until = 0.0
            elif not shim_until:
                shim_until = now + SHIM_END_S
            elif now > shim_until:
                send(process.shim, signal.SIGKILL, self._boot)
            await asyncio.sleep(POLL_S / 5)
        reap(process.shim)
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
        return {
            one for one in family((process.shim, process.engine), RUN_VARIABLE, process.stem) if alive(one, self._boot)
        }

    def runs(self, process: EngineProcess) -> bool:
        """Whether the engine itself runs."""
        return alive(process.engine, self._boot) and self.ended(process) is None

    def tail(self, stem: str) -> str:
        """The end of its log."""
        try:
            with Path(f"{stem}.log").open("rb") as stream:
                stream.seek(0, os.SEEK_END)
                stream.seek(max(0, stream.tell() - TAIL_BYTES))
                return stream.read().decode("utf-8", errors="replace")
        except OSError:
            return ""


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an engine gets of the agent's environment: what it needs to run, and no secret.

    Weights are on the disk, so nothing on a hub is asked for.
    """
    kept = {name: value for name, value in environ.items() if _INHERITED.fullmatch(name) and not _SECRET.search(name)}
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _attempt(log: Path) -> int:
    number = log.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _link(link: Path, target: str) -> None:
    partial = link.with_name(".latest")
    with contextlib.suppress(OSError):  # a convenience for people: no start fails for it
        partial.unlink(missing_ok=True)
        partial.symlink_to(target)
        partial.replace(link)

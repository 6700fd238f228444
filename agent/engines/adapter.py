"""What the agent must know of an engine, as one small contract."""

import math
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fleet.reasons import Failure, Reason
from fleet.spec import Engine

MAX_LINE = 300
"""Characters of a log line that travel in a failure: enough for a cause, little enough for a table."""


@dataclass(frozen=True)
class Gang:
    """One shard's place among those of its replica, each on a node of its own."""

    nodes: int
    rank: int
    address: str
    """Of rank 0's node, where the others find it."""
    port: int
    """Of the rendezvous, reserved on rank 0's node."""
    timeout_s: int
    """For all to come, and for each step they take together."""
    interface: str = ""
    """The network interface that has this node's address; empty: the engine looks for one itself."""

    @property
    def meeting_point(self) -> str:
        """`address:port`."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def sockets(self) -> dict[str, str]:
        """The variables that hold NCCL and Gloo to the interface: left to themselves they may take a bridge."""
        return dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), self.interface) if self.interface else {}


@dataclass(frozen=True)
class Traces:
    """Where an engine sends spans of its own, and the span that those of its start belong beneath."""

    endpoint: str
    """OTLP."""
    protocol: str
    """grpc, in clear text; or http/protobuf, with the whole path."""
    headers: str = field(default="", repr=False)
    """`name=value,…`, percent-encoded; may hold a secret, so it travels in the environment."""
    parent: str = ""
    """As a W3C traceparent."""

    def variables(self) -> dict[str, str]:
        """As OpenTelemetry's libraries read them, and `traceparent` as vLLM's processes hand it to each other."""
        wanted = {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": self.protocol,
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": self.headers,
            "OTEL_SERVICE_NAME": "llmgw-engine",
            "traceparent": self.parent,
        }
        return {name: value for name, value in wanted.items() if value}


@dataclass(frozen=True)
class Launch:
    """One engine process to be started. Sizes are bytes."""

    host: str
    port: int
    weights: Path
    """The directory that holds the model's files."""
    entry: str
    """The file in it an engine is pointed at; empty where it is the directory."""
    weights_size: int
    alias: str
    """The name clients use."""
    context_length: int
    concurrency: int
    memory: int
    """Reserved, on each device."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty: it runs on the CPU."""
    gpu_total: int = 0
    """Of the smallest of these GPUs."""
    gpu_free: int = 0
    """Measured just now, on the fullest of them: others may be there too."""
    args: tuple[str, ...] = ()
    trust_remote_code: bool = False
    """Whether it may run Python that stands beside the weights."""
    key: str = field(default="", repr=False)
    """What it asks of its clients; "": nothing. Reaches it by its environment, never on a command line."""
    pipeline: int = 1
    """Stages the layers are spread over."""
    gang: Gang | None = None
    """None: one shard is the whole replica."""
    traces: Traces | None = None
    """None: it makes no spans."""

    @property
    def tensor_parallel(self) -> int:
        """Over how many devices each layer is split."""
        return self.devices // self.pipeline

    @property
    def devices(self) -> int:
        """All those of the replica; a node without a GPU is one."""
        return max(1, len(self.gpus)) * (self.gang.nodes if self.gang is not None else 1)


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: an exit code, a signal, or neither where nobody was left to see it."""

    code: int | None = None
    signal: int | None = None
    note: str = ""
    """Why neither is known."""
    oom: bool = False
    """The kernel's out-of-memory killer was at work on this machine while it ran."""

    @property
    def sentence(self) -> str:
        """`exit code 1`, `killed by signal 9`, or the note."""
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return f"exit code {self.code}" if self.code is not None else self.note


class Adapter(Protocol):
    """One engine: how it is installed, started, asked and understood. Values in, values out; it starts nothing."""

    @property
    def engine(self) -> Engine:
        """Which one."""

    @property
    def module(self) -> str:
        """The Python module whose import proves an installation."""

    @property
    def tested_version(self) -> str:
        """Installed where agent.yaml names none; empty: agent.yaml must name one."""

    @property
    def health_path(self) -> str:
        """Answers 200 when the engine serves."""

    @property
    def silent_ranks(self) -> bool:
        """Whether the shards of a gang but the first open no port, so that only their process shows that they live."""

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        """What to install, as requirements with exact versions."""

    def unwanted(self) -> tuple[str, ...]:
        """Packages that come along and must go again."""

    def command(self, python: Path, launch: Launch) -> list[str]:
        """Program and arguments."""

    def environment(self, launch: Launch) -> dict[str, str]:
        """Variables it needs beside the node's own."""

    def in_flight(self, metrics: str) -> int | None:
        """Requests running or queued, from the text of `/metrics`; None where it does not say."""

    def tokens(self, metrics: str) -> int | None:
        """Tokens read and written since it started, from the same text; None where it does not say."""

    def progress(self, metrics: str) -> tuple[float, ...]:
        """Whatever moves while it works, from the same text, and stands still when it hangs; empty where it is mute."""

    def diagnose(self, status: ExitStatus, tail: str) -> Failure:
        """Why it ended, from its exit and the end of its log."""


def fraction(part: int, whole: int) -> str:
    """A share as engines take it, such as `0.1499`: rounded down, as its memory was reserved and no more."""
    return f"{min(9999, max(1, part * 10_000 // max(1, whole))) / 10_000:.4f}"


Pattern = tuple[re.Pattern[str], Reason]


def patterns(*table: tuple[str, Reason]) -> tuple[Pattern, ...]:
    """Compile a diagnosis table; the first row that matches any line wins, so the most telling rows come first."""
    return tuple((re.compile(expression, re.IGNORECASE), reason) for expression, reason in table)


def diagnose(
    table: Iterable[Pattern], status: ExitStatus, tail: str, *, clean: Callable[[str], str] = str.strip
) -> Failure:
    """The reason of the first row of the table that a line of the log matches, with that line.

    Where none matches, the reason is EXITED with the last line; `clean` takes an engine's prefix off a line.
    """
    if status.signal == signal.SIGKILL and status.oom:
        return Failure(reason=Reason.OUT_OF_MEMORY, detail=f"{status.sentence} while the kernel was out of memory")
    lines = [line for line in tail.splitlines() if line.strip()]
    for pattern, reason in table:
        line = next((line for line in lines if pattern.search(line)), None)
        if line is not None:
            return Failure(reason=reason, detail=_detail(clean(line), status))
    if status.signal is not None or not lines:
        return Failure(reason=Reason.EXITED, detail=f"the engine ended: {status.sentence}")
    return Failure(reason=Reason.EXITED, detail=_detail(clean(lines[-1]), status))


def _detail(line: str, status: ExitStatus) -> str:
    shown = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}…"
    return f"{shown} ({status.sentence})"


def samples(metrics: str, names: Sequence[str]) -> tuple[float, ...]:
    """The values of Prometheus samples with one of these names, over all labels, in the order they stand there."""
    found = []
    for line in metrics.splitlines():
        name, _, _ = line.partition(" ")
        if name.partition("{")[0] not in names:
            continue
        try:
            value = float(line.rsplit("}", 1)[-1].split()[0 if "}" in line else 1])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            found.append(value)
    return tuple(found)


def gauge_sum(metrics: str, names: Sequence[str]) -> int | None:
    """Their sum, in whole numbers; None where none is there."""
    found = samples(metrics, names)
    return int(sum(found)) if found else None

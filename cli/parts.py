"""The processes of the embedded system: how each is started, how long it may take, and how long to end."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.home import REPO, Home, SystemRecord

TEMPORAL, WORKER, GATEWAY, AGENT = "temporal", "worker", "gateway", "agent"

MARK = "LLMGW_SYSTEM"
"""In the environment of every part: the home it belongs to."""
ENGINE_MARK = "LLMGW_RUN"
"""In the environment of every engine, which gets nothing else of ours: the path of its log (agent/supervisor.py)."""

STOP_ORDER = (AGENT, GATEWAY, WORKER, TEMPORAL)
"""The agent first: it tells the fleet that it leaves, which takes a worker and Temporal."""

READY_S = 90.0
"""Each is ready within a few seconds; ninety are a cold disk on a busy machine."""


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    command: tuple[str, ...]
    stop_grace_s: float
    """Between TERM and KILL."""


def parts(home: Home, system: SystemRecord) -> tuple[Part, ...]:
    """All of them, in the order of their start."""
    python = sys.executable
    server = ("--config", str(home.server_yaml))
    front = ("--port", str(system.gateway_port), *_metrics(system.gateway_metrics_port))
    node = ("--config", str(home.agent_yaml), *_metrics(system.agent_metrics_port))
    return (
        Part(TEMPORAL, _temporal(home, system), stop_grace_s=10.0),
        Part(WORKER, (python, "worker.py", *server, *_metrics(system.worker_metrics_port)), stop_grace_s=10.0),
        # Answers under way may take five seconds.
        Part(GATEWAY, (python, "-m", "gateway", *server, *front), stop_grace_s=10.0),
        # It drains for five seconds, and gives its engines ten between TERM and KILL.
        Part(AGENT, (python, "-m", "agent", *node, "--stop-engines"), stop_grace_s=30.0),
    )


def environment(base: Mapping[str, str], home: Home, system: SystemRecord) -> dict[str, str]:
    """What every part gets: the operator's environment, but for where Temporal is and where the code is."""
    kept = {
        key: value
        for key, value in base.items()
        if not key.startswith("TEMPORAL_") and key not in ("PYTHONSAFEPATH", "PYTHONHOME")
    }
    return {
        **kept,
        "TEMPORAL_ADDRESS": system.address,
        "TEMPORAL_NAMESPACE": "default",
        # The operator's own profile may ask for TLS or a key, and the embedded server has neither.
        "TEMPORAL_CONFIG_FILE": os.devnull,
        "PYTHONPATH": str(REPO),
        "PYTHONUNBUFFERED": "1",
        MARK: str(home.path),
    }


def belongs(environment: Mapping[str, str], home: Home, node_data: Path) -> bool:
    """Whether a process with this environment is a part of this system, or an engine of its node."""
    return environment.get(MARK) == str(home.path) or environment.get(ENGINE_MARK, "").startswith(f"{node_data}/logs/")


def _metrics(port: int) -> tuple[str, str]:
    return "--metrics-port", str(port)


def _temporal(home: Home, system: SystemRecord) -> tuple[str, ...]:
    binary = Path(sys.executable).parent / "temporal"
    return (
        str(binary),
        *("server", "start-dev", "--ip", "127.0.0.1", "--port", str(system.port), "--ui-port", str(system.ui_port)),
        *("--db-filename", str(home.path / "temporal.db"), "--log-level", "warn"),
        # As it comes, each hop waits for a 50 ms tick and each write is synced: an activity takes 150 instead of 20 ms.
        *("--dynamic-config-value", "history.transferProcessorMaxPollRPS=2000"),
        *("--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"),
    )

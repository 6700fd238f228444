"""The embedded system's home directory: where its files lie, and the configuration written into a new one."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cli.errors import CtlError
from cli.processes import ProcessRecord
from fleet.records import Record
from runtime.config import AgentConfig, ServerConfig, default_node_name, load

RecordT = TypeVar("RecordT", bound=Record)

REPO = Path(__file__).resolve().parent.parent

SERVER_YAML = """\
# The control plane (worker.py) and the gateway. Paths are relative to this file. Every key: docs/configuration.md
cell: main

mirror:
  path: mirror          # the fleet's one copy of each model's files

gateway:
  host: 127.0.0.1
  port: 8080            # `ctl up` chooses another where this one is taken

engine_key_file: engine.key       # what the engines ask of gateway and worker; agent.yaml names it too
weights_token_file: weights.token # opens what only a node has, the hub being away; agent.yaml names it too

metrics:
  enabled: true         # pages for Prometheus; the logs say at which ports

tracing:
  enabled: true
  file: traces/{service}.jsonl    # read by `ctl trace`; one file for each process
  # endpoint: http://127.0.0.1:4317
"""

AGENT_YAML = """\
# This machine as a node. Paths are relative to this file. Every key: docs/configuration.md
node: %(node)s
cell: main
data: node              # ledger, logs, weights and engine environments of this node
address: 127.0.0.1      # where gateway and worker reach its engines
engine_key_file: engine.key

engines:
  llamacpp: {}          # installed on first use

weights:
  token_file: weights.token       # who has it may read this node's weights: the worker, and other nodes
  port: 0               # any free one

metrics:
  enabled: true         # a page for Prometheus; the log says at which port

tracing:
  enabled: true
  file: traces/{service}.jsonl
  # endpoint: http://127.0.0.1:4317
"""


class SystemRecord(Record):
    """What `up` chose, as `run/system.json` keeps it for every later call."""

    port: int
    ui_port: int
    gateway_port: int
    worker_metrics_port: int = 9464
    gateway_metrics_port: int = 9465
    agent_metrics_port: int = 9466

    @property
    def address(self) -> str:
        """Of Temporal."""
        return f"127.0.0.1:{self.port}"

    @property
    def ui_url(self) -> str:
        """Of Temporal's web UI."""
        return f"http://127.0.0.1:{self.ui_port}"

    @property
    def gateway_url(self) -> str:
        """Of the OpenAI-compatible front door."""
        return f"http://127.0.0.1:{self.gateway_port}"


@dataclass(frozen=True)
class Home:
    """The directory, and the names in it."""

    path: Path
    code: Path = REPO
    """The checkout whose worker, gateway and agent run."""

    @property
    def server_yaml(self) -> Path:
        """Settings of worker and gateway."""
        return self.path / "server.yaml"

    @property
    def agent_yaml(self) -> Path:
        """Settings of this machine's agent."""
        return self.path / "agent.yaml"

    @property
    def engine_key(self) -> Path:
        """What its engines ask of their clients."""
        return self.path / "engine.key"

    @property
    def weights_token(self) -> Path:
        """What its node asks of whoever reads weights from it."""
        return self.path / "weights.token"

    @property
    def traces(self) -> Path:
        """Spans as OTLP JSON lines."""
        return self.path / "traces"

    @property
    def models(self) -> Path:
        """The demo's model."""
        return self.path / "models"

    @property
    def run(self) -> Path:
        """What runs: one record for each process, and `system.json`."""
        return self.path / "run"

    def log(self, name: str) -> Path:
        """A process's log."""
        return self.path / "logs" / f"{name}.log"

    def prepare(self) -> None:
        """Make the directories, and the settings where there are none; what is there is never changed."""
        for directory in (self.path, self.run, self.traces, self.path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        _write_new(self.server_yaml, SERVER_YAML)
        _write_new(self.agent_yaml, AGENT_YAML.replace("%(node)s", default_node_name()))
        for secret in (self.engine_key, self.weights_token):
            _write_new(secret, secrets.token_hex(32) + "\n", mode=0o600)

    def server(self) -> ServerConfig:
        """server.yaml. Raises ConfigError."""
        return load(self.server_yaml, ServerConfig)

    def agent(self) -> AgentConfig:
        """agent.yaml. Raises ConfigError."""
        return load(self.agent_yaml, AgentConfig)

    def cell(self) -> str:
        """The cell whose fleet ctl speaks of."""
        return self.server().cell if self.server_yaml.exists() else "main"

    def system(self) -> SystemRecord | None:
        """What the last `up` chose; None where the system is down."""
        path = self.run / "system.json"
        return _read(path, SystemRecord) if path.exists() else None

    def save_system(self, record: SystemRecord) -> None:
        """Keep the choice."""
        _write(self.run / "system.json", record)

    def forget_system(self) -> None:
        """The system is down."""
        (self.run / "system.json").unlink(missing_ok=True)

    def process(self, name: str) -> ProcessRecord | None:
        """The process that was started under this name last, dead or alive."""
        path = self.run / f"{name}.json"
        return _read(path, ProcessRecord) if path.exists() else None

    def save_process(self, record: ProcessRecord) -> None:
        """Keep it."""
        _write(self.run / f"{record.name}.json", record)

    def forget_process(self, name: str) -> None:
        """It is gone."""
        (self.run / f"{name}.json").unlink(missing_ok=True)


def find_home() -> Home:
    """`$LLMGW_HOME`, or `.llmgw` in the checkout."""
    named = os.environ.get("LLMGW_HOME")
    return Home(Path(named).expanduser().resolve() if named else REPO / ".llmgw")


def _write_new(path: Path, text: str, mode: int = 0o644) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - only os.open sets the mode as it is made
        file.write(text)


def _write(path: Path, record: Record) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _read(path: Path, kind: type[RecordT]) -> RecordT:
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        raise CtlError(f"{path} cannot be read: remove it once nothing of the system runs") from error

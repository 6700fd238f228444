"""A node's parts with the stand-in engine: everything of the agent but Temporal, in a directory of its own."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from activities.node_contract import ShardChange, ShardRef, StartShard
from agent.ending import Endings
from agent.engines.adapter import Adapter, ExitStatus, Launch, diagnose, gauge_sum, patterns, samples
from agent.install import Installs
from agent.inventory import measure, reserved
from agent.layout import Layout
from agent.ledger import Ledger
from agent.machine import Machine, ThisMachine
from agent.peaks import Peaks
from agent.probe import Probe
from agent.recovery import pids
from agent.shards import Shards
from agent.start import Starter
from agent.supervisor import Supervisor
from agent.turns import Turns
from agent.watch import Watch
from agent.weights import WeightStore
from fleet.reasons import Failure, Reason
from fleet.spec import Engine, Format, ModelFile, Weights
from fleet.state import CPU, DeviceShare, Inventory
from runtime.config import AgentConfig, EngineConfig
from runtime.engine_keys import EngineKeys
from tests.system import free_ports

MIB = 1024**2
PROGRAM = Path(__file__).with_name("engine.py")
TABLE = patterns((r"no memory", Reason.OUT_OF_MEMORY), (r"bad flag", Reason.BAD_FLAG))


@dataclass(frozen=True)
class FakeAdapter:
    """Starts the stand-in under llama.cpp's name."""

    engine: Engine = Engine.LLAMACPP
    module: str = "json"
    tested_version: str = "1"
    health_path: str = "/health"
    silent_ranks: bool = False

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        return ()

    def unwanted(self) -> tuple[str, ...]:
        return ()

    def command(self, python: Path, launch: Launch) -> list[str]:
        return [str(python), str(PROGRAM), launch.host, str(launch.port), *launch.args]

    def environment(self, launch: Launch) -> dict[str, str]:
        return {"FAKE_MODEL": str(launch.weights / launch.entry)}

    def in_flight(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("fake_running",))

    def tokens(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("fake_tokens_total",))

    def progress(self, metrics: str) -> tuple[float, ...]:
        return samples(metrics, ("fake_tokens_total",))

    def diagnose(self, status: ExitStatus, tail: str) -> Failure:
        return diagnose(TABLE, status, tail)


@dataclass
class FakeNode:
    """One agent process's parts; a second one on the same directory is the next agent."""

    home: Path
    probe: Probe
    adapter: Adapter = field(default_factory=FakeAdapter)
    python: Path = field(default_factory=lambda: Path(sys.executable))
    ports: tuple[int, int] = (0, 0)
    unhealthy_after_s: float = 15.0
    hung_after_s: float = 300.0
    settings: dict[str, Any] = field(default_factory=dict)
    machine: Machine = field(default_factory=ThisMachine)
    release_wait_s: float = 0.3
    kill_wait_s: float = 15.0
    ledger_kind: type[Ledger] = Ledger
    supervisor_kind: type[Supervisor] = Supervisor

    def __post_init__(self) -> None:
        if self.ports == (0, 0):
            first = free_ports(20)
            self.ports = (first, first + 19)
        self.config = AgentConfig(
            node="n1",
            data=self.home / "node",
            ports=self.ports,
            keep_free=0,
            engines={Engine.LLAMACPP: EngineConfig(bin=self.python)},
            **self.settings,
        )
        self.keys = EngineKeys(self.config.engine_key_file)
        self.layout = Layout(self.config.data)
        self.ledger = self.ledger_kind(self.layout.ledger)
        self.supervisor = self.supervisor_kind(self.layout, kill_wait_s=self.kill_wait_s)
        self.quarantines: list[str] = []
        self.endings = Endings(
            self.ledger,
            self.supervisor,
            self.machine.gpus,
            lambda: self.quarantines.append(self.endings.quarantine()),
            release_wait_s=self.release_wait_s,
        )
        self.changes: list[ShardChange] = []
        self.left = 0
        adapters = {Engine.LLAMACPP: self.adapter}
        self.weights = WeightStore(self.layout.weights, 0)
        self.installs = Installs(self.layout.engines, self.config.engines, adapters)
        self.watch = Watch(
            "n1",
            self.ledger,
            self.supervisor,
            self.endings,
            self.probe,
            adapters,
            self.changes.append,
            unhealthy_after_s=self.unhealthy_after_s,
            hung_after_s=self.hung_after_s,
        )
        self.starter = Starter(
            self.config,
            self.machine,
            adapters,
            self.installs,
            self.weights,
            self.ledger,
            self.supervisor,
            self.endings,
            self.probe,
            self.watch,
            self.keys,
        )
        self.peaks = Peaks(self.ledger, self.supervisor, self.probe, adapters, self.machine.gpus, look_s=0.05)
        self.turns = Turns("n1", self.starter, self.peaks, self._left)
        self.shards = Shards(self.turns, self.ledger, self.weights, self.measure)

    def _left(self) -> None:
        self.left += 1

    def measure(self) -> Inventory:
        held = reserved(self.ledger.entries())
        return measure(
            self.config, self.machine, self.installs, self.weights, pids(self.starter), held, self.layout.weights
        )

    def successor(self) -> "FakeNode":
        """The parts of the next agent process on this node."""
        return replace(self)

    async def close(self) -> None:
        """End whatever this node started, known to its ledger or not."""
        await self.watch.close()
        for stem in self.supervisor.running_launches():
            process = self.supervisor.find(stem)
            if process is not None:
                await self.supervisor.stop(process, 0)

    def request(
        self, *knobs: str, generation: int = 1, replica: str = "tiny-0", memory: int = MIB, deadline_s: float = 20.0
    ) -> StartShard:
        return StartShard(
            shard=ShardRef(replica=replica, generation=generation),
            model="tiny",
            engine=Engine.LLAMACPP,
            weights=self.mirror(),
            devices=(DeviceShare(uuid=CPU, memory=memory),),
            gpus=0,
            context_length=512,
            concurrency=2,
            args=knobs,
            ready_deadline_s=deadline_s,
        )

    def mirror(self, model_id: str = "tiny-abc") -> Weights:
        """A small model's weights in a mirror directory."""
        directory = self.home / "mirror" / model_id
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "model.gguf"
        if not file.exists():
            file.write_bytes(b"GGUF" + bytes(1000))
        return weights_of(directory, "model.gguf")


def weights_of(directory: Path, entry: str) -> Weights:
    """Weights of one file in a directory that is its mirror."""
    return Weights(
        model_id=directory.name,
        format=Format.GGUF,
        entry=entry,
        files=(ModelFile(path=entry, size=(directory / entry).stat().st_size),),
        mirror=directory.as_uri(),
    )

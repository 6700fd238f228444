"""One start of one shard, from the request to an engine that serves, as the steps people see in its trace."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from activities.node_contract import GangPlace, StartPhase, StartProgress, StartShard
from agent.ending import Endings
from agent.engine_traces import engine_traces
from agent.engines.adapter import Adapter, Gang, Launch
from agent.gpus import Gpu
from agent.install import Installs
from agent.interfaces import interface_of
from agent.ledger import Entry, Ledger
from agent.machine import Machine
from agent.ports import choose_port
from agent.probe import Health, Probe
from agent.rendezvous import Meeting, come, gather
from agent.spans import step
from agent.supervisor import Supervisor
from agent.watch import Watch
from agent.weights import Brought, WeightStore
from fleet.engine_args import check_wish
from fleet.metrics import FETCHED
from fleet.peaks import Run, digest_of
from fleet.reasons import Reason, StepError
from fleet.render import size
from fleet.spec import Engine
from fleet.state import CPU
from runtime.config import AgentConfig
from runtime.engine_keys import EngineKeys
from runtime.instruments import counter

logger = logging.getLogger(__name__)

BYTES = counter(FETCHED)

READY_POLL_S = 0.075
"""Small models are ready within half a second; a look costs the engine a millisecond."""
MEMBERS_S = 1.0
"""Between looks at the processes of an engine that starts on GPUs; one takes some 20 ms of a core."""


@dataclass
class Progress:
    """Where a start is now; the heartbeat reads it."""

    now: StartProgress = field(default_factory=lambda: StartProgress(phase=StartPhase.INSTALL))
    began_ns: int = field(default_factory=time.time_ns)

    def at(self, phase: StartPhase, done: int = 0, total: int = 0, *, detail: str = "") -> None:
        """The start is here."""
        self.now = StartProgress(phase=phase, detail=detail, done_bytes=done, total_bytes=total)

    def said(self) -> StartProgress:
        """The same with the times that the trace of a next attempt needs."""
        return self.now.model_copy(update={"began_ns": self.began_ns, "said_ns": time.time_ns()})


@dataclass(frozen=True)
class Starter:
    """What a start needs; keeps nothing but the ledger's entry."""

    config: AgentConfig
    machine: Machine
    adapters: Mapping[Engine, Adapter]
    installs: Installs
    weights: WeightStore
    ledger: Ledger
    supervisor: Supervisor
    endings: Endings
    probe: Probe
    watch: Watch
    keys: EngineKeys

    async def prepare(self, request: StartShard, progress: Progress) -> Brought:
        """Have engine and weights, so that a gang starts at one time. Raises StepError as `launch`."""
        self.check_wish(request)
        with self.weights.claim(request.weights):
            await self._checked_memory(request)
            _, brought = await self._provided(request, progress)
            return brought

    async def launch(self, request: StartShard, progress: Progress) -> Entry:
        """Check memory, have engine and weights, launch. The ledger has the entry from just before the launch on."""
        self.check_wish(request)
        with self.weights.claim(request.weights):  # from then on the ledger keeps them from being removed
            return await self._launched(request, progress)

    async def _launched(self, request: StartShard, progress: Progress) -> Entry:
        gpus = await self._checked_memory(request)
        python, brought = await self._provided(request, progress)
        with step("choose port"):  # and room for its log among those of all launches: both reach the disk
            if request.gang is not None:
                self.ledger.meet(request.shard, request.gang.port)  # an agent before this one may have kept it
            entry = self._entry(request, brought, gpus)
        if request.gang is not None:
            progress.at(StartPhase.RENDEZVOUS)
            entry = await self._met(request.gang, entry)
        progress.at(StartPhase.LAUNCH)
        gpus = await self._checked_memory(request)  # the install and the fetch may have taken hours
        with step("launch engine", {"llmgw.engine": request.engine.value}) as span:
            launch = self._launch(request, entry, brought.directory, gpus)
            launch = replace(launch, traces=engine_traces(self.config.tracing, span.get_span_context()))
            adapter = self.adapters[request.engine]
            self.ledger.reserve(entry)
            process = await self.supervisor.launch(
                entry.stem, adapter.command(python, launch), adapter.environment(launch), entry.model_dump_json()
            )
            entry = entry.model_copy(update={"process": process})
            self.ledger.put(entry)
            span.set_attributes({"process.pid": process.engine.pid, "llmgw.port": entry.port})
        logger.info(
            "engine launched replica=%s generation=%d engine=%s pid=%d port=%d",
            entry.shard.replica,
            entry.shard.generation,
            entry.engine,
            process.engine.pid,
            entry.port,
        )
        return entry

    async def _provided(self, request: StartShard, progress: Progress) -> tuple[Path, Brought]:
        """The engine's interpreter and the weights."""
        progress.at(StartPhase.INSTALL)
        python = await self.installs.ensure(
            request.engine,
            gpus=request.gpus > 0,
            say=lambda words: progress.at(StartPhase.INSTALL, detail=words),
        )
        progress.at(StartPhase.FETCH, 0, request.weights.size)
        with step("fetch weights", {"llmgw.model": request.model}) as span:
            brought = await self.weights.bring(
                request.weights, lambda done, total: progress.at(StartPhase.FETCH, done, total), request.peers
            )
            span.set_attributes({"llmgw.weights.outcome": brought.outcome, "llmgw.bytes": brought.copied_bytes})
            for kind, given in brought.sources.items():
                BYTES.add(given, {"llmgw.weights.outcome": kind})
            span.set_attributes({f"llmgw.bytes.{kind}": given for kind, given in brought.sources.items()})
        return python, brought

    async def _met(self, place: GangPlace, entry: Entry) -> Entry:
        """Wait until all shards of the gang are at this point. Raises StepError: RENDEZVOUS, PORT_IN_USE."""
        meeting = Meeting(entry.shard, place, self.config.rendezvous_s)
        attributes = {"llmgw.rendezvous": meeting.where, "llmgw.nodes": ",".join(place.nodes)}
        with step("rendezvous", attributes):
            if entry.shard.rank:
                lead = await come(meeting)
                silent = self.adapters[entry.engine].silent_ranks
                return entry.model_copy(update={"lead": lead}) if silent else entry
            await gather(meeting, entry.endpoint)
            return entry

    async def wait_ready(self, entry: Entry, deadline_s: float, progress: Progress) -> Entry:
        """Wait until the engine serves. Raises StepError: NEVER_READY, or why it ended."""
        progress.at(StartPhase.WAIT)
        path = self.adapters[entry.engine].health_path
        endpoint = entry.lead or entry.endpoint
        deadline = time.monotonic() + deadline_s
        polls, looked = 0, -math.inf
        with step("wait for engine", {"llmgw.port": entry.port}) as span:
            try:
                while True:
                    polls += 1
                    answer = await self.probe.health(endpoint, path)
                    self._raise_if_ended(entry)
                    if _on_gpus(entry) and time.monotonic() - looked >= MEMBERS_S:
                        entry, looked = self._with_members(entry), time.monotonic()
                    if answer.health is Health.SERVING and (entry.lead or self._listens(entry)):
                        break
                    if time.monotonic() >= deadline:
                        raise StepError(
                            Reason.NEVER_READY,
                            f"{entry.engine} does not serve after {deadline_s:.0f} s: {answer.detail or 'no answer'}",
                        )
                    await asyncio.sleep(READY_POLL_S)
            finally:
                span.set_attribute("llmgw.polls", polls)
            ready = self._with_members(entry).model_copy(update={"ready": True})
            self.ledger.put(ready)
            return ready

    def _with_members(self, entry: Entry) -> Entry:
        """With the processes it has now beside those it had: should it die, their GPU memory must be back too."""
        if entry.process is None:
            return entry
        members = {*entry.members, *self.supervisor.members(entry.process)}
        if members == set(entry.members):
            return entry
        found = entry.model_copy(update={"members": tuple(sorted(members, key=lambda member: member.pid))})
        self.ledger.put(found)
        return found

    async def _checked_memory(self, request: StartShard) -> tuple[Gpu, ...]:
        with step("check memory"):
            return await asyncio.to_thread(self.check_memory, request)

    def check_wish(self, request: StartShard) -> None:
        """Refuse what this node's engines never get, whoever let it pass. Raises StepError: BAD_FLAG, REMOTE_CODE."""
        check_wish(request.engine, request.args, trust_remote_code=request.trust_remote_code)
        if request.trust_remote_code and not self.config.trust_remote_code:
            raise StepError(Reason.REMOTE_CODE, f"{request.model} brings code of its own, which this node does not run")

    def check_memory(self, request: StartShard) -> tuple[Gpu, ...]:
        """Refuse what cannot be held by what is free now, whatever the plan believed; the GPUs it is given.

        May take seconds: a driver without persistence wakes its GPUs first. Raises StepError: MEMORY, GPU_MEMORY, and
        GPU_COUNT for a GPU that is not there any more.
        """
        need = sum(share.memory for share in request.devices if share.uuid == CPU)
        free = self.machine.ram().free
        if need > free:
            raise StepError(
                Reason.MEMORY, f"{request.model} needs {size(need)} of RAM, {size(free)} is free on the node"
            )
        shares = [share for share in request.devices if share.uuid != CPU]
        present = {gpu.uuid: gpu for gpu in self.machine.gpus()} if shares else {}
        for share in shares:
            gpu = present.get(share.uuid)
            if gpu is None:
                raise StepError(Reason.GPU_COUNT, f"{request.model} was placed on {share.uuid}, which is not there now")
            if share.memory > gpu.free:
                raise StepError(Reason.GPU_MEMORY, f"{request.model} needs {size(share.memory)} of {_taken(gpu)}")
        return tuple(present[share.uuid] for share in shares)

    def _entry(self, request: StartShard, brought: Brought, gpus: Sequence[Gpu]) -> Entry:
        port = choose_port(self.config, self.ledger).port
        host = f"[{self.config.address}]" if ":" in self.config.address else self.config.address
        return Entry(
            shard=request.shard,
            model=request.model,
            engine=request.engine,
            devices=request.devices,
            port=port,
            endpoint=f"http://{host}:{port}",
            stem=self.supervisor.next_stem(request.shard),
            weights_id=request.weights.model_id,
            weights_outcome=brought.outcome,
            run=Run(
                weights=request.weights.model_id,
                engine=request.engine,
                context_length=request.context_length,
                concurrency=request.concurrency,
                gpus=request.gpus,
                args=digest_of(request.args),
                nodes=len(request.gang.nodes) if request.gang is not None else 1,
                stages=request.pipeline_parallel,
                device=gpus[0].model if gpus else CPU,
            ),
        )

    def _launch(self, request: StartShard, entry: Entry, directory: Path, gpus: Sequence[Gpu]) -> Launch:
        return Launch(
            host=self.config.address,
            port=entry.port,
            weights=directory,
            entry=request.weights.entry,
            weights_size=request.weights.size,
            alias=request.model,
            context_length=request.context_length,
            concurrency=request.concurrency,
            memory=max((share.memory for share in request.devices), default=0),
            gpus=tuple(gpu.uuid for gpu in gpus),
            gpu_total=min((gpu.total for gpu in gpus), default=0),
            gpu_free=min((gpu.free for gpu in gpus), default=0),
            args=request.args,
            trust_remote_code=request.trust_remote_code,
            key=self.keys.newest,
            pipeline=request.pipeline_parallel,
            gang=self._gang(request),
        )

    def _gang(self, request: StartShard) -> Gang | None:
        place = request.gang
        if place is None:
            return None
        return Gang(
            nodes=len(place.nodes),
            rank=request.shard.rank,
            address=place.address,
            port=place.port,
            # All have met, so it is for steps such as loading, at which one node may be much slower.
            timeout_s=math.ceil(request.ready_deadline_s),
            interface=self.config.interface or interface_of(self.config.address),
        )

    def _raise_if_ended(self, entry: Entry) -> None:
        if entry.process is None:
            raise StepError(Reason.EXITED, "the engine was never launched")
        status = self.supervisor.ended(entry.process)
        if status is not None:
            failure = self.watch.cause(entry, status)
            raise StepError(failure.reason, failure.detail, node=failure.node)

    def _listens(self, entry: Entry) -> bool:
        """Whether the one who answers is ours: another process may have taken the port before the engine could."""
        if entry.process is None:
            return False
        for member in self.supervisor.members(entry.process):
            try:
                sockets = psutil.Process(member.pid).net_connections(kind="tcp")
            except psutil.AccessDenied:
                return True  # cannot be known here; the answer stands
            except psutil.NoSuchProcess:
                continue
            if any(one.status == psutil.CONN_LISTEN and one.laddr.port == entry.port for one in sockets):
                return True
        return False


def _on_gpus(entry: Entry) -> bool:
    return any(share.uuid != CPU for share in entry.devices)


def _taken(gpu: Gpu) -> str:
    """`GPU-1, 3 GiB of it is free: pid 41 holds most of the rest`."""
    holder = f": pid {gpu.holders[0].pid} holds most of the rest" if gpu.holders else ""
    return f"{gpu.uuid}, {size(gpu.free)} of it is free{holder}"

"""The job's third step: can the engine load these weights, and does one shard fit any node of the fleet?"""

import json
from collections.abc import Callable
from typing import TypeVar

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.contract import (
    CHECK_FIT,
    QUERY_SNAPSHOT,
    CheckRequest,
    CheckResult,
    Snapshot,
    fleet_id,
)
from fleet.architectures import ARCHITECTURES, FORMATS, engine_for
from fleet.engine_args import check_wish
from fleet.fit import (
    Estimate,
    FitVerdict,
    ModelShape,
    default_context,
    estimate,
    gpus_of,
    judge,
    shape_from_config,
    shape_from_gguf,
)
from fleet.gguf import read_gguf
from fleet.reasons import Reason, StepError
from fleet.render import size
from fleet.repos import default_name, parse_repo
from fleet.safetensors import safetensors_extent
from fleet.spec import Engine, Format, JobRequest, ModelFile, ShardNeed, Task, Weights
from fleet.state import FleetState
from fleet.tasks import task_of
from runtime.mirrors import reading
from runtime.threads import in_thread

T = TypeVar("T")

MAX_CONFIG = 4 * 1024**2
"""Bytes of a config.json: they have a few thousand."""


class Check:
    """Compares what the mirrored weights say about themselves with the engine and with the fleet's capacity."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @activity.defn(name=CHECK_FIT)
    async def check_fit(self, request: CheckRequest) -> CheckResult:
        """Raises StepError: WEIGHTS_UNREADABLE, WEIGHTS_MISSING, UNSUPPORTED_ARCHITECTURE, BAD_INPUT, FIT_UNKNOWN,
        DOES_NOT_FIT. A fleet without a node that could answer is no failure: the verdict is then UNKNOWN."""
        shape = await in_thread(read_shape, request.weights)
        return decide(shape, request.weights, request.request, await self._snapshot(request.cell))

    async def _snapshot(self, cell: str) -> FleetState:
        handle = self._client.get_workflow_handle(fleet_id(cell))
        try:
            snapshot: Snapshot = await handle.query(QUERY_SNAPSHOT, result_type=Snapshot)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return FleetState(cell=cell)  # the fleet's workflow has not been started: no node has joined
            raise
        return snapshot.state


def decide(shape: ModelShape, weights: Weights, request: JobRequest, state: FleetState) -> CheckResult:
    """The answer from what is known; pure. Raises StepError."""
    name = request.name or (default_name(parse_repo(request.repo)) if request.repo else weights.model_id)
    engine = request.engine or engine_for(weights.format)
    check_wish(engine, request.args, trust_remote_code=request.trust_remote_code)
    _check_engine(engine, weights.format, shape, trusted=request.trust_remote_code)
    context = request.context_length or default_context(shape)
    if shape.context_length and context > shape.context_length:
        raise StepError(
            Reason.BAD_INPUT, f"context_length: {context} is more than the {shape.context_length} {name} was made for"
        )
    parts = None if request.memory is not None else _estimate(name, shape, engine, context, request)
    memory = int(request.memory) if request.memory is not None else parts.total if parts else 0
    need = ShardNeed(memory=memory, gpus=request.gpus, disk=weights.size)
    judgement = judge(state, name, engine, need)
    if judgement.verdict is FitVerdict.DOES_NOT_FIT:
        few = need.gpus > max((gpus_of(node) for node in state.nodes.values()), default=0)
        raise StepError(Reason.GPU_COUNT if few else Reason.DOES_NOT_FIT, judgement.sentence)
    return CheckResult(
        verdict=judgement.verdict,
        sentence=f"{judgement.sentence} ({_account(parts)})",
        engine=engine,
        architecture=shape.architecture,
        context_length=context,
        need=need,
        estimate=parts,
        candidate=judgement.candidate,
    )


def read_shape(weights: Weights) -> ModelShape:
    """What the files in the mirror say; each weight file must be as long as its header says. Raises StepError."""
    return _read_gguf_shape(weights) if weights.format is Format.GGUF else _read_config_shape(weights)


def _read_gguf_shape(weights: Weights) -> ModelShape:
    headers = {file.path: _with_reader(weights, file, read_gguf) for file in weights.files if _is(file.path, ".gguf")}
    if weights.entry not in headers:
        raise StepError(Reason.WEIGHTS_MISSING, f"{weights.entry or 'the GGUF'} is not among the model's files")
    entry = headers[weights.entry]
    if not sum(header.tensors for header in headers.values()):
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{weights.entry} holds no tensors")
    kind = entry.metadata.get("general.type", "model")
    if kind != "model":
        raise StepError(Reason.UNSUPPORTED_ARCHITECTURE, f"{weights.entry} is of type {str(kind)[:40]}, not a model")
    return shape_from_gguf(entry, weights.size)


def _read_config_shape(weights: Weights) -> ModelShape:
    tensors = [file for file in weights.files if _is(file.path, ".safetensors")]
    for file in tensors:
        _with_reader(weights, file, safetensors_extent)
    with reading(weights.mirror, ModelFile(path="config.json", size=0)) as config_file:
        text = config_file.at(0, MAX_CONFIG + 1)
    try:
        config = json.loads(text) if len(text) <= MAX_CONFIG else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise StepError(Reason.WEIGHTS_UNREADABLE, "config.json is not a JSON object")
    return shape_from_config(config, sum(file.size for file in tensors))


def _with_reader(weights: Weights, file: ModelFile, parse: Callable[[str, int, Callable[[int, int], bytes]], T]) -> T:
    with reading(weights.mirror, file) as opened:
        return parse(file.path.rpartition("/")[2], opened.size, opened.at)


def _is(path: str, suffix: str) -> bool:
    return path.lower().endswith(suffix)


def _check_engine(engine: Engine, format: Format, shape: ModelShape, *, trusted: bool) -> None:
    if FORMATS[engine] is not format:
        raise StepError(
            Reason.UNSUPPORTED_ARCHITECTURE, f"{engine} reads {FORMATS[engine]} weights, these are {format}"
        )
    known = shape.architecture in ARCHITECTURES[engine] or task_of(shape.architecture) is not Task.GENERATE
    if not known and not trusted:  # its own code may say how it is loaded
        raise StepError(
            Reason.UNSUPPORTED_ARCHITECTURE,
            f"{engine} does not load the architecture {shape.architecture[:80] or '(none is named)'!r}",
        )


def _estimate(name: str, shape: ModelShape, engine: Engine, context: int, request: JobRequest) -> Estimate:
    found = estimate(shape, engine, context_length=context, concurrency=request.concurrency, gpus=request.gpus)
    if isinstance(found, Estimate):
        return found
    raise StepError(
        Reason.FIT_UNKNOWN, f"the memory {name} needs cannot be told: its weights lack the {', the '.join(found)}"
    )


def _account(parts: Estimate | None) -> str:
    if parts is None:
        return "as the operator said"
    return f"weights {size(parts.weights)}, KV cache {size(parts.kv_cache)}, overhead {size(parts.overhead)}"

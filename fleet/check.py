"""The check's answer, from a model's shape and what the fleet has: engine, need, verdict, and what would do."""

from collections.abc import Collection

from fleet.architectures import ARCHITECTURES, FORMATS, engine_for
from fleet.engine_args import check_wish
from fleet.estimate import Estimate, default_context, estimate, kv_bytes_per_token
from fleet.fit import FitVerdict, Parallelism, gpus_of, judge, offers, smallest
from fleet.inputs import typed_fault
from fleet.peaks import Run, believed, digest_of, peak_of
from fleet.reasons import Reason, StepError
from fleet.records import Record
from fleet.render import size
from fleet.repos import default_name, parse_repo
from fleet.shape import ModelShape
from fleet.spec import Engine, Format, ModelRequest, ShardNeed, Task, Weights, spread_fault
from fleet.state import CPU, FleetState
from fleet.tasks import task_of


class CheckResult(Record):
    """The answer of the check, on the control plane's side."""

    verdict: FitVerdict
    sentence: str
    engine: Engine
    architecture: str
    context_length: int
    need: ShardNeed
    """Its memory is 0 where that is not known."""
    estimate: Estimate | None = None
    """None where the operator said the memory, or it cannot be told."""
    measured: int = 0
    """The peak of earlier runs of the same in bytes; 0: none is known."""
    missing: tuple[str, ...] = ()
    """What the weights do not tell."""
    kv_bytes_per_token: int = 0
    """Of all layers together, while no window is full."""
    concurrency: int = 0
    nodes: int = 1
    """Nodes one replica spans."""
    parallelism: Parallelism | None = None
    """The smallest that fits, where what was asked for does not."""
    candidate: str = ""
    """A node to run the preflight on; empty where there is none just now."""
    reason: Reason | None = None
    """Why it is not served so; None where nothing speaks against it."""


def examine(
    shape: ModelShape, weights: Weights, wish: ModelRequest, state: FleetState, silent: Collection[str] = ()
) -> CheckResult:
    """Whether a model fits when it is served as wished. `silent` as in `fit.judge`.

    Raises StepError: BAD_FLAG, BAD_INPUT, UNSUPPORTED_ARCHITECTURE.
    """
    name = wish.name or (default_name(parse_repo(wish.repo)) if wish.repo else weights.model_id)
    wrong = typed_fault(wish)
    if wrong:
        raise StepError(Reason.BAD_INPUT, wrong)
    engine = wish.engine or engine_for(weights.format)
    check_wish(engine, wish.args, trust_remote_code=wish.trust_remote_code)
    check_engine(engine, weights.format, shape, trusted=wish.trust_remote_code)
    fault = spread_fault(engine, wish.nodes, wish.gpus, wish.pipeline_parallel)
    if fault:
        raise StepError(Reason.BAD_INPUT, fault)
    context = wish.context_length or default_context(shape)
    if shape.context_length and context > shape.context_length:
        raise StepError(
            Reason.BAD_INPUT, f"context_length: {context} is more than the {shape.context_length} {name} was made for"
        )
    if shape.layers and wish.pipeline_parallel > len(shape.layers):
        stages = f"pipeline_parallel: {wish.pipeline_parallel} stages"
        raise StepError(Reason.BAD_INPUT, f"{stages} are more than the {len(shape.layers)} layers of {name}")
    found = estimate(
        shape,
        engine,
        context_length=context,
        concurrency=wish.concurrency,
        gpus=wish.gpus,
        nodes=wish.nodes,
        stages=wish.pipeline_parallel,
        args=wish.args,
    )
    parts = found if isinstance(found, Estimate) and wish.memory is None else None
    missing = found if not isinstance(found, Estimate) else ()
    peak = _peak(state, weights, engine, context, wish)
    memory = int(wish.memory) if wish.memory is not None else believed(engine, parts.total, peak) if parts else peak
    need = ShardNeed(memory=memory, gpus=wish.gpus, disk=weights.size)
    result = CheckResult(
        verdict=FitVerdict.UNKNOWN,
        sentence="",
        engine=engine,
        architecture=shape.architecture,
        context_length=context,
        need=need,
        estimate=parts,
        measured=peak,
        missing=missing,
        kv_bytes_per_token=kv_bytes_per_token(shape, engine, wish.args) if not missing else 0,
        concurrency=wish.concurrency,
        nodes=wish.nodes,
    )
    if not memory:
        lacks = f"the memory {name} needs cannot be told: its weights lack the {', the '.join(missing)}"
        return result.model_copy(update={"sentence": lacks, "reason": Reason.FIT_UNKNOWN})
    return _judged(result, shape, name, wish, state, silent)


def examine_on_paper(shape: ModelShape, weights: Weights, wish: ModelRequest, state: FleetState) -> CheckResult:
    """As `examine`, of empty machines; where they have GPUs and no number is asked for, the smallest that fits."""
    most = max((gpus_of(node) for node in state.nodes.values()), default=0)
    if wish.gpus or wish.nodes > 1 or wish.memory is not None or not most:
        return examine(shape, weights, wish, state)
    first = examine(shape, weights, wish.model_copy(update={"gpus": 1}), state)
    found = first.parallelism
    if first.verdict is FitVerdict.FITS or found is None:
        return first
    return examine(shape, weights, wish.model_copy(update={"gpus": found.gpus, "nodes": found.nodes}), state)


def refusal(result: CheckResult) -> StepError | None:
    """Why a job goes no further; None where it does. That no node could answer yet stops nothing."""
    return StepError(result.reason, result.sentence) if result.reason is not None else None


def check_engine(engine: Engine, format: Format, shape: ModelShape, *, trusted: bool) -> None:
    """Whether the engine reads the format and loads the architecture. Raises StepError(UNSUPPORTED_ARCHITECTURE)."""
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


def _judged(
    result: CheckResult,
    shape: ModelShape,
    name: str,
    wish: ModelRequest,
    state: FleetState,
    silent: Collection[str],
) -> CheckResult:
    judgement = judge(state, name, result.engine, result.need, result.nodes, silent)
    update: dict[str, object] = {"verdict": judgement.verdict, "candidate": judgement.candidate}
    account = _account(result)
    if judgement.verdict is not FitVerdict.DOES_NOT_FIT:
        return result.model_copy(update={**update, "sentence": f"{judgement.sentence} ({account})"})
    most = max((gpus_of(node) for node in state.nodes.values()), default=0)
    other = None
    if wish.memory is None:
        other = smallest(
            state,
            shape,
            result.engine,
            context_length=result.context_length,
            concurrency=wish.concurrency,
            disk=result.need.disk,
            args=wish.args,
        )
    sentence = judgement.sentence if wish.memory is not None else f"{judgement.sentence} ({account})"
    if other is not None:
        sentence += f"; it fits on {other.sentence}"
    return result.model_copy(
        update={
            **update,
            "sentence": sentence,
            "parallelism": other,
            "reason": Reason.GPU_COUNT if wish.gpus > most else Reason.DOES_NOT_FIT,
        }
    )


def _peak(state: FleetState, weights: Weights, engine: Engine, context: int, wish: ModelRequest) -> int:
    nodes = offers(state, engine)
    kinds = {device.model for node in nodes for device in node.inventory.devices if device.uuid != CPU}
    run = Run(
        weights=weights.model_id,
        engine=engine,
        context_length=context,
        concurrency=wish.concurrency,
        gpus=wish.gpus,
        args=digest_of(wish.args),
        nodes=wish.nodes,
        stages=wish.pipeline_parallel,
    )
    return peak_of(state.peaks, run, kinds if wish.gpus else {CPU})


def _account(result: CheckResult) -> str:
    parts = result.estimate
    told = "as the operator said"
    if parts is not None:
        told = f"weights {size(parts.weights)}, KV cache {size(parts.kv_cache)}, overhead {size(parts.overhead)}"
    if not result.measured:
        return told
    estimated = f"; estimated {size(parts.total)}: {told}" if parts is not None else ""
    return f"an earlier run took {size(result.measured)}{estimated}"

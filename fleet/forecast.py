"""What wishes would come to: they are applied to a copy of the state, and passes are planned until nothing is left.

Nothing is looked up for it: a model's weights and memory are those the catalog knows, or what the wish itself says.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fleet import wishes
from fleet.architectures import FORMATS, engine_for
from fleet.commits import commit
from fleet.facts import ReplicaEvent, replica_changed
from fleet.inputs import request_of, spec_of
from fleet.planning import plan
from fleet.reasons import LlmgwError, Reason, RefusedError
from fleet.records import Record
from fleet.repos import parse_repo
from fleet.spec import Engine, Format, JobRequest, ModelSpec, ShardNeed, Weights, safe_id
from fleet.state import FleetState, ModelRecord, ReplicaRecord, ReplicaState
from fleet.steps import Plan

PASSES = 12
"""Passes that are looked ahead: a rollout takes one for each replica and one more; what is later changes anyway."""

FOLLOWS: dict[ReplicaState, ReplicaState | None] = {
    ReplicaState.PLACED: ReplicaState.SERVING,
    ReplicaState.STARTING: ReplicaState.SERVING,
    ReplicaState.DRAINING: None,
    ReplicaState.DRAINED: None,
    ReplicaState.STOPPING: None,
}
"""What a replica comes to where all goes well; None: it is gone."""


class Unplanned(Record):
    """A wish that is not part of the forecast."""

    model: str
    sentence: str


class Pass(NamedTuple):
    """One pass, and the state it was planned from."""

    plan: Plan
    state: FleetState


def wish(
    state: FleetState, requests: Iterable[JobRequest], removed: Iterable[str], now: float
) -> tuple[FleetState, tuple[Unplanned, ...]]:
    """The state with all wishes that can be taken, and a sentence for each that cannot."""
    refused = []
    for request in requests:
        name = request.name or ""
        try:
            state, _ = wishes.apply(state, wished_spec(state, request), now)
        except LlmgwError as error:
            refused.append(Unplanned(model=name, sentence=error.failure.detail))
    for name in removed:
        state = wishes.remove(state, name)
    return state, tuple(refused)


def passes(state: FleetState, now: float) -> tuple[Pass, ...]:
    """What the fleet would do, pass by pass: each begins when all that the one before asked for has gone well."""
    found: list[Pass] = []
    while len(found) < PASSES:
        decided = plan(state, now)
        if decided.quiet:
            break
        found.append(Pass(decided, state))
        state = obeyed(commit(state, decided, now), now)
    return tuple(found)


def obeyed(state: FleetState, now: float) -> FleetState:
    """The state once every start has succeeded and every drain and stop has ended."""
    for replica in list(state.replicas.values()):
        if replica.state in FOLLOWS:
            if FOLLOWS[replica.state] is ReplicaState.SERVING:
                state = _fetched(state, replica)
            event = ReplicaEvent(replica=replica.id, generation=replica.generation, state=FOLLOWS[replica.state])
            state = replica_changed(state, event, now)
    return state


def _fetched(state: FleetState, replica: ReplicaRecord) -> FleetState:
    """What it reads lies on its nodes, and stays there when it is gone."""
    for shard in replica.shards:
        node = state.nodes.get(shard.node)
        if node is None or not shard.weights or shard.weights in node.inventory.weights:
            continue
        here = node.inventory
        update = {"weights": (*here.weights, shard.weights), "disk_free": here.disk_free - shard.disk}
        state = state.with_node(node.model_copy(update={"inventory": here.model_copy(update=update)}))
    return state


def wished_spec(state: FleetState, request: JobRequest) -> ModelSpec:
    """The spec a serve job would put into the catalog. Raises StepError or RefusedError where that cannot be told."""
    name = request.name or ""
    known = _known(state, request)
    if known is None:
        return _spec_of_new(name, request)
    spec = known.spec
    changed = _reestimated(spec, request)
    if request.memory is None and changed:
        raise RefusedError(
            Reason.FIT_UNKNOWN,
            f"what it needs is estimated anew, as its {' and '.join(changed)} changed: say its memory, or apply it",
        )
    memory = int(request.memory) if request.memory is not None else spec.need.memory
    return spec_of(
        name,
        request,
        repo=spec.repo,
        engine=request.engine or spec.engine,
        weights=spec.weights,
        need=ShardNeed(memory=memory, gpus=request.gpus, disk=spec.need.disk),
        context_length=request.context_length or spec.context_length,
        task=spec.task,
    )


ESTIMATED_FROM = ("memory", "gpus", "context_length", "concurrency")
"""What a job's check estimates memory from, beside the weights and the engine, or takes in place of an estimate."""


def _reestimated(spec: ModelSpec, request: JobRequest) -> list[str]:
    """What the estimate in the catalog was made from and is asked for differently now."""
    before = request_of(spec)
    changed = [name for name in ESTIMATED_FROM if getattr(before, name) != getattr(request, name)]
    return changed if request.engine in (None, spec.engine) else ["engine", *changed]


def _known(state: FleetState, request: JobRequest) -> ModelRecord | None:
    """A model with these weights: the one of that name first."""
    same = [
        model
        for model in state.models.values()
        if model.spec.request is not None and model.spec.request.repo == request.repo
    ]
    own = safe_id(request.name or "")
    return min(same, key=lambda model: (model.spec.id != own, model.spec.id), default=None)


def _spec_of_new(name: str, request: JobRequest) -> ModelSpec:
    engine = request.engine or _engine(request.repo or "")
    absent = [key for key, value in (("memory", request.memory), ("engine", engine)) if value is None]
    if request.memory is None or engine is None:
        raise RefusedError(
            Reason.FIT_UNKNOWN,
            f"what it needs is known only once its weights are looked up: say its {' and '.join(absent)}, or apply it",
        )
    weights = Weights(model_id=f"{safe_id(name)}-new", format=FORMATS[engine], entry="", files=(), mirror="")
    return spec_of(
        name,
        request,
        repo=request.repo or "",
        engine=engine,
        weights=weights,
        need=ShardNeed(memory=int(request.memory), gpus=request.gpus),
        context_length=request.context_length or 1,
    )


def _engine(repo: str) -> Engine | None:
    """The engine, where the reference itself tells the weights' format."""
    ref = parse_repo(repo)
    return engine_for(Format.GGUF) if ref.variant or ref.location.lower().endswith(".gguf") else None

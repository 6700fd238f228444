"""How one model is, for a job that waits for it, and where all are reached: pure, from the fleet's state."""

from activities.contract import Route, Routes
from fleet import standing
from fleet.state import HOLDING, FleetState, ModelRecord, ReplicaRecord, ReplicaState
from workflows.messages import ModelStatus, Phase, ReplicaBrief, Wait


def model_status(state: FleetState, model_id: str) -> ModelStatus:
    """The model's phase with the sentence a person reads; REMOVED when the catalog does not hold it."""
    model = state.models.get(model_id)
    replicas = [replica for replica in state.replicas.values() if replica.model == model_id]
    if model is None:
        return ModelStatus(model=model_id, phase=Phase.REMOVED, sentence="it is gone")
    briefs = tuple(
        ReplicaBrief(
            replica=replica.id,
            nodes=replica.nodes,
            state=replica.state,
            endpoint=replica.endpoint,
            trace=replica.trace,
        )
        for replica in sorted(replicas, key=lambda replica: replica.id)
        if replica.state in HOLDING
    )
    failure = None if model.removing else standing.given_up(state, model)
    told_at = max((replica.told_at for replica in replicas), default=0.0)
    told = ModelStatus(model=model_id, phase=Phase.FAILED, sentence="", replicas=briefs, told_at=told_at)
    if failure is not None:
        return told.model_copy(update={"sentence": failure.line, "failure": failure})
    phase, sentence, waits_for = _phase(state, model, replicas)
    return told.model_copy(update={"phase": phase, "sentence": sentence, "waits_for": waits_for})


def _states(replicas: list[ReplicaRecord]) -> str:
    return ", ".join(sorted({replica.state.value for replica in replicas}))


def _phase(state: FleetState, model: ModelRecord, replicas: list[ReplicaRecord]) -> tuple[Phase, str, Wait | None]:
    if model.removing:
        left = [f"{replica.id} {replica.state}" for replica in replicas]
        return Phase.WAITING, f"{', '.join(left)}" if left else "nothing runs any more", Wait.STOP
    missing = standing.missing(state, model)
    going = standing.superfluous(state, model)
    if missing == 0 and going:
        return Phase.WAITING, f"{', '.join(replica.id for replica in going)} still to go: {_states(going)}", Wait.STOP
    if missing == 0:
        serving = [replica for replica in replicas if replica.state is ReplicaState.SERVING]
        where = ", ".join(sorted({node for replica in serving for node in replica.nodes}))
        count = f"{len(serving)} replicas" if len(serving) != 1 else "1 replica"
        return Phase.SERVING, f"{count} on {where}" if serving else "no replica is wanted", None
    if model.waiting:
        return Phase.WAITING, model.waiting, Wait.ROOM
    starting = [
        f"{replica.id} on {', '.join(replica.nodes)}"
        for replica in replicas
        if replica.state in (ReplicaState.PLACED, ReplicaState.STARTING)
    ]
    if starting:
        # Placed is decided and not begun: its own span is not open yet.
        begun = any(replica.state is ReplicaState.STARTING for replica in replicas)
        return Phase.STARTING, f"starting {', '.join(starting)}", None if begun else Wait.DECISION
    failed = [replica for replica in replicas if replica.state is ReplicaState.FAILED and replica.failure is not None]
    if failed and failed[0].failure is not None:
        sentence = f"{failed[0].id} failed and is tried again: {failed[0].failure.line}"
        return Phase.WAITING, sentence, Wait.BACKOFF
    return Phase.WAITING, "waiting for the next pass", Wait.DECISION


def routes(state: FleetState) -> Routes:
    """Every model with the engines that take its requests now."""
    serving: dict[str, list[str]] = {}
    for replica in state.replicas.values():
        if replica.state is ReplicaState.SERVING:
            serving.setdefault(replica.model, []).append(replica.endpoint)
    return Routes(
        routes=tuple(
            Route(
                model=model.spec.name,
                endpoints=tuple(serving.get(key, ())),
                waiting="" if key in serving else model_status(state, key).sentence,
                barred="" if key in serving else standing.barred(state, model),
            )
            for key, model in sorted(state.models.items())
        )
    )

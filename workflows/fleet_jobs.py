"""What jobs ask of Fleet, in which order they have their turn, and what they are told meanwhile."""

from collections.abc import Mapping

from fleet import job_queue, standing, wishes
from fleet.inputs import request_of
from fleet.job_queue import Queues, Turn
from fleet.reasons import RefusedError
from fleet.spec import safe_id
from fleet.state import FleetState
from workflows import messages
from workflows.messages import Answer, Ask, AskKind, Message, ModelStatus
from workflows.model_status import model_status

QUEUEING = frozenset({AskKind.TURN, AskKind.LEAVE})
"""Asks that are answered by a turn, or not at all."""


class FleetJobs:
    """The jobs that Fleet knows of: those that watch a model, and those that wait for their turn."""

    def __init__(self, watchers: Mapping[str, str], queues: Queues) -> None:
        self.watchers = dict(watchers)
        """Job workflow id → model id."""
        self.queues = queues
        self._told: dict[str, ModelStatus] = {}
        self._turns: dict[str, Turn] = {}

    def take(self, state: FleetState, ask: Ask, now: float) -> tuple[FleetState, str, list[Message]]:
        """Grant what a job asks: the next state, the sentence of what changed, and the answer."""
        if ask.kind in QUEUEING:
            return self._queue(state, ask), "", []
        sentence = ""
        try:
            state, sentence, answer = _answer(state, ask, now)
        except RefusedError as refused:
            answer = Answer(failure=refused.failure)
        if ask.kind is AskKind.ABANDON:
            self.forget(ask.job)
        elif answer.model:
            self.watchers[ask.job] = answer.model
            self._told.pop(ask.job, None)
        return state, sentence, [Message(workflow=ask.job, signal=messages.SIGNAL_ANSWER, answer=answer)]

    def forget(self, job: str) -> None:
        """It ended: nobody waits for an answer there, and the next in its queue has its turn."""
        self.watchers.pop(job, None)
        self._told.pop(job, None)
        self._turns.pop(job, None)
        self.queues = job_queue.leave(self.queues, job)

    def news(self, state: FleetState) -> list[Message]:
        """What those who watch and wait do not know yet."""
        found = []
        for job, model in self.watchers.items():
            status = model_status(state, model)
            if self._told.get(job) != status:
                self._told[job] = status
                found.append(Message(workflow=job, signal=messages.SIGNAL_MODEL_STATUS, status=status))
        going = {key for key, model in state.models.items() if model.removing}
        for job, turn in job_queue.turns(self.queues, going).items():
            if self._turns.get(job) != turn:
                self._turns[job] = turn
                found.append(Message(workflow=job, signal=messages.SIGNAL_TURN, turn=turn))
        return found

    def _queue(self, state: FleetState, ask: Ask) -> FleetState:
        if ask.kind is AskKind.LEAVE:
            self.forget(ask.job)
            return wishes.settle(state, ask.name, ask.job)
        self.queues = job_queue.enter(self.queues, safe_id(ask.name), ask.job, ask.job_kind)
        self._turns.pop(ask.job, None)  # who asks again, because its Fleet was another one, is told again
        return state


def _answer(state: FleetState, ask: Ask, now: float) -> tuple[FleetState, str, Answer]:
    """The next state, what changed, and the answer. Raises RefusedError."""
    if ask.kind is AskKind.APPLY and ask.spec is not None:
        state, applied = wishes.apply(state, ask.spec, now, job=ask.job)
        return state, f"{ask.spec.name} was applied", Answer(applied=applied, model=ask.spec.id)
    if ask.kind is AskKind.ABANDON:
        sentence = f"the job that wanted {ask.name} was cancelled"
        return wishes.abandon(state, ask.name, ask.job), sentence, Answer()
    model = wishes.find_model(state, ask.name)
    if ask.kind is AskKind.KNOWN:
        return state, "", Answer(known=request_of(model.spec))
    if ask.kind is AskKind.ROOM:
        return state, "", Answer(failure=standing.no_room(state, model))
    others = tuple(
        other.spec.name
        for other in state.models.values()
        if other.spec.id != model.spec.id and other.spec.weights.model_id == model.spec.weights.model_id
    )
    answer = Answer(model=model.spec.id, weights=model.spec.weights, shared_with=others)
    return wishes.remove(state, ask.name), f"{model.spec.name} is removed", answer

"""A job's line to Fleet: what it asks, its turn among the jobs on its model, and what Fleet tells of the model."""

from temporalio import workflow

from activities.contract import fleet_id
from fleet.job_queue import Turn
from fleet.reasons import Failure, Reason
from fleet.spec import JobKind
from workflows import messages, signals
from workflows.cancels import or_cancelled
from workflows.failures import failed
from workflows.messages import Answer, Ask, AskKind, ModelStatus
from workflows.spans import TELL_FLEET, span, timed
from workflows.steps import Step

FLEET_WAIT_S = 30.0
"""How long a job waits for a Fleet that does not run before it fails and says so."""

ASK_AGAIN_S, ASK_AGAIN_MAX_S = 60.0, 3600.0
"""Between two asks for the same turn: a Fleet that somebody ended and began anew knows of no queue. It doubles, as the
job ahead may take a day and a history should stay short."""


class FleetLine:
    """What one job and Fleet say to each other."""

    def __init__(self) -> None:
        self.cell = ""
        self.name = ""
        """The model's."""
        self.model: ModelStatus | None = None
        """How the model was when Fleet last told."""
        self.news: list[ModelStatus] = []
        """What Fleet told and the placement step has not looked at."""
        self.turn: Turn | None = None
        self.applied = False
        """Whether a spec of this job may have reached Fleet."""
        self._answer: Answer | None = None
        self._queued = False

    # -- what arrives -------------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        """Fleet answered."""
        self._answer = answer

    def told(self, status: ModelStatus) -> None:
        """Fleet told how the model is."""
        self.model = status
        self.news.append(status)

    # -- what is asked ------------------------------------------------------------------------------------------------

    async def ask(self, ask: Ask) -> Answer:
        """Ask and wait for the answer. Raises ApplicationError with the reason of a refusal."""
        answer = await self.inquire(ask)
        if answer.failure is not None:
            raise failed(answer.failure)
        return answer

    async def inquire(self, ask: Ask) -> Answer:
        """Ask and wait for the answer, also one that is a failure."""
        self._answer = None
        await self._tell(ask)
        await workflow.wait_condition(lambda: self._answer is not None)
        return self._answer or Answer()

    def asks(self, kind: AskKind) -> Ask:
        """An ask about this job's model."""
        return Ask(kind=kind, job=workflow.info().workflow_id, name=self.name)

    async def take_turn(self, kind: JobKind, step: Step) -> bool:
        """Wait until no earlier job on the model runs, showing which one is waited for; whether there was one."""
        self._queued = True
        asked_ns = workflow.time_ns()
        ask = self.asks(AskKind.TURN).model_copy(update={"job_kind": kind})
        await self._tell(ask)
        await workflow.wait_condition(lambda: self.turn is not None)
        if self._granted():
            return False
        with span("wait for turn", {}, start_ns=asked_ns) as waiting:
            wait_s = ASK_AGAIN_S
            while not self._granted():
                seen = self.turn
                step.say(f"waits for {seen.waiting if seen is not None else 'its turn'}")
                waiting.set_attribute("llmgw.detail", seen.waiting if seen is not None else "")
                try:
                    await workflow.wait_condition(
                        lambda seen=seen: self.turn != seen,  # type: ignore[misc]
                        timeout=wait_s,
                        timeout_summary="ask again for the turn",
                    )
                except TimeoutError:
                    await self._tell(ask)
                    wait_s = min(ASK_AGAIN_MAX_S, wait_s * 2)
        step.say("")
        return True

    async def hang_up(self, *, take_back: bool) -> None:
        """The job ends: the next one has its turn. `take_back`: what it did to the catalog is undone before."""
        if take_back and self.applied:
            kind = AskKind.ABANDON
        elif self._queued:
            kind = AskKind.LEAVE
        else:
            return
        told = signals.tell_surely(
            fleet_id(self.cell), messages.SIGNAL_ASK, self.asks(kind), give_up_after_s=FLEET_WAIT_S
        )
        await timed(TELL_FLEET, told)

    def _granted(self) -> bool:
        return self.turn is not None and self.turn.granted

    async def _tell(self, ask: Ask) -> None:
        fleet = fleet_id(self.cell)
        told = signals.tell_surely(fleet, messages.SIGNAL_ASK, ask, give_up_after_s=FLEET_WAIT_S)
        if not await or_cancelled(told):
            raise failed(Failure(reason=Reason.INTERNAL, detail=f"{fleet} does not run: start worker.py"))

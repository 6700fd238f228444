"""A job's wait for its model to serve: what it shows meanwhile, and when it ends without that."""

from temporalio import workflow

from fleet.job_queue import Waiting
from fleet.reasons import Failure, Reason
from fleet.room_deadline import RoomDeadline
from fleet.spec import JobKind
from workflows.failures import failed
from workflows.fleet_line import FleetLine
from workflows.messages import AskKind, ModelStatus, Phase, Wait
from workflows.spans import WAIT_FOR_WORKER, ends, link, past
from workflows.steps import Step


class Waited:
    """The parts of the wait in which no start was under way, as spans; starts have their own, which it links to."""

    def __init__(self, waits_for: Wait) -> None:
        self._waits_for: Wait | None = waits_for
        self._sentence = ""
        self._since_ns = workflow.time_ns()

    def told(self, status: ModelStatus) -> None:
        """Fleet told how the model is: what was waited for until now may be over."""
        self._sentence = self._sentence or status.sentence
        if status.waits_for is self._waits_for and status.phase in (Phase.WAITING, Phase.STARTING):
            return
        if self._waits_for is None:
            # The start's span ends as Fleet is told; from then on the word was on its way to this job.
            past(WAIT_FOR_WORKER, max(self._since_ns, int(status.told_at * 1e9)))
        self.over()
        self._waits_for, self._sentence, self._since_ns = status.waits_for, status.sentence, workflow.time_ns()

    def over(self) -> None:
        """Nothing is waited for any more."""
        if self._waits_for is not None:
            past(self._waits_for.value, self._since_ns, {"llmgw.detail": self._sentence} if self._sentence else {})


class PlacementWait:
    """`room_deadline_s`: how long it may wait for a place that no node has; None: for as long as it takes."""

    def __init__(self, line: FleetLine, room_deadline_s: float | None) -> None:
        self._line = line
        self._room = RoomDeadline(room_deadline_s)
        self.may_end_early = False
        """Jobs that began before there were queues wait for ever, as they did then."""
        self.take_back = False
        """Whether it ended so that what the job did to the catalog is to be undone."""

    async def until(self, goal: Phase, step: Step) -> ModelStatus:
        """Until the model serves, or is gone, showing why it does not yet. Raises ApplicationError with the reason."""
        linked: set[str] = set()
        waited = Waited(Wait.STOP if goal is Phase.REMOVED else Wait.DECISION)
        while True:
            try:
                await self._news(goal)
            except BaseException as error:
                if ends(error):
                    waited.over()
                raise
            status = self._line.news.pop(0)
            waited.told(status)
            step.say(status.sentence)
            for replica in status.replicas:
                if goal is Phase.SERVING and replica.trace not in linked:
                    linked.add(replica.trace)
                    for found in link(replica.trace, {"llmgw.replica": replica.replica}):
                        step.span.add_link(found.context, found.attributes)
            if status.phase is goal:
                return status
            if status.phase is Phase.FAILED and status.failure is not None:
                raise failed(status.failure)
            if status.phase is Phase.REMOVED:
                raise failed(Failure(reason=Reason.CANCELLED, detail=f"{self._line.name} was removed meanwhile"))

    async def _news(self, goal: Phase) -> None:
        """Until Fleet has told something. A job gives way to a later one that wants the model otherwise, and gives up
        where no node has room for as long as it may wait."""
        line = self._line
        if not self.may_end_early or goal is Phase.REMOVED:
            await workflow.wait_condition(lambda: bool(line.news))
            return
        while not line.news:
            behind = line.turn.behind if line.turn is not None else None
            if behind is not None and behind.kind is JobKind.REMOVE:
                raise self._superseded(behind)
            self._room.waits(line.model is not None and line.model.phase is Phase.WAITING, workflow.time())
            try:
                await workflow.wait_condition(
                    lambda behind=behind: bool(line.news) or line.turn is None or line.turn.behind != behind,  # type: ignore[misc]
                    timeout=self._room.left_s(workflow.time(), rival=behind is not None),
                    timeout_summary="how long it may wait for room",
                )
            except TimeoutError:
                await self._end_without_room(behind)

    async def _end_without_room(self, behind: Waiting | None) -> None:
        """Raise, unless room is being made."""
        failure = await self._no_room()
        if failure is None:
            self._room.looked(workflow.time())
            return
        self.take_back = True
        if behind is not None and not self._room.expired(workflow.time()):
            raise self._superseded(behind)
        raise failed(self._room.given_up(failure))

    def _superseded(self, behind: Waiting) -> Exception:
        detail = f"{behind.job} on the same model came while this one waited for {self._line.name} to serve"
        return failed(Failure(reason=Reason.SUPERSEDED, detail=detail))

    async def _no_room(self) -> Failure | None:
        return (await self._line.inquire(self._line.asks(AskKind.ROOM))).failure

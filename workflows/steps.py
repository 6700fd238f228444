"""A job's steps: their table for the web UI and ctl, and their spans, kept in one place so that they agree."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span
from temporalio import workflow
from temporalio.exceptions import is_cancelled_exception

from activities.contract import STEPS, StepState, StepStatus
from fleet.metrics import JOB_STEP
from workflows.failures import failed, failure_of
from workflows.numbers import measure
from workflows.spans import ends, fail, instant, past, span


class Step:
    """A step under way; `detail` is what a person sees beside it."""

    def __init__(self, span: Span, show: Callable[[str], None]) -> None:
        self.span = span
        self._show = show
        self._part = ""
        self._since_ns = workflow.time_ns()

    def say(self, detail: str) -> None:
        """Replace the detail."""
        self._show(detail)

    def part(self, name: str, *, before: str = "") -> None:
        """From now on it does this, under a span of its own: for a step that had to wait for something. What it did
        until now was `before`."""
        self.close_part(before)
        self._part, self._since_ns = name, workflow.time_ns()

    def close_part(self, otherwise: str = "") -> None:
        """The part under way is over; one that was not named is `otherwise`, or the step itself."""
        name = self._part or otherwise
        if name:
            past(name, self._since_ns)


class Steps:
    """The rows of one job. `changed` is called after every change."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._rows = {name: StepStatus(name=name) for name in STEPS}
        self._changed = changed

    @property
    def rows(self) -> tuple[StepStatus, ...]:
        """In the order of the steps."""
        return tuple(self._rows.values())

    @property
    def current(self) -> str:
        """The step under way; "" between steps."""
        return next((row.name for row in self._rows.values() if row.state is StepState.RUNNING), "")

    def skip(self, name: str, why: str) -> None:
        """A step this kind of job has no use for; its span has no length."""
        self._set(name, state=StepState.SKIPPED, detail=why)
        instant(name, {"llmgw.state": StepState.SKIPPED.value, "llmgw.detail": why})

    @contextmanager
    def run(self, name: str) -> Iterator[Step]:
        """One step: done when the block ends, failed when an error leaves it, as an ApplicationError with the cause."""
        self._set(name, state=StepState.RUNNING, started_at=workflow.time())
        with span(name, {}) as opened:
            step = Step(opened, lambda detail: self._set(name, detail=detail))
            try:
                yield step
            except BaseException as error:
                if not ends(error):
                    raise  # the step is still running
                step.close_part()
                failure = failure_of(error)
                self._end(name, StepState.FAILED, opened, failure.line, failure.reason.value)
                fail(opened, failure)
                if is_cancelled_exception(error):
                    raise
                raise failed(failure) from error
            step.close_part()
            self._end(name, StepState.DONE, opened, self._rows[name].detail)

    def _end(self, name: str, state: StepState, opened: Span, detail: str, reason: str = "") -> None:
        self._set(name, state=state, detail=detail, ended_at=workflow.time())
        took = self._rows[name].ended_at - self._rows[name].started_at
        labels = {"llmgw.step": name, "llmgw.state": state.value}
        measure(JOB_STEP, took, {**labels, "error.type": reason} if reason else labels)
        opened.set_attribute("llmgw.state", state.value)
        opened.set_attribute("llmgw.detail", detail)

    def _set(self, name: str, **update: object) -> None:
        self._rows[name] = self._rows[name].model_copy(update=update)
        self._changed()

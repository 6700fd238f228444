"""The stable shapes of `--json`, as goldens, and what a person sees of the same values."""

import pytest

from activities.contract import (
    JobState,
    JobStatus,
    StepState,
    StepStatus,
)
from cli.progress import LineProgress, step_line
from cli.views import (
    MODEL_COLUMNS,
    NODE_COLUMNS,
    REPLICA_COLUMNS,
    ModelState,
    clock,
    model_row,
    model_views,
    node_row,
    node_views,
    replica_row,
    replica_views,
    waiting_views,
)
from fleet.commits import commit
from fleet.facts import Load, ReplicaEvent, loaded, replica_changed
from fleet.planning import plan
from fleet.reasons import Failure, Reason
from fleet.spec import Engine, JobKind, Scaling
from fleet.state import EngineOffer, FleetState, ReplicaState
from fleet.wishes import cordon, drain_node, remove, scale
from tests.fleets import GIB, fleet, inventory, spec

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CORRUPT = Failure(reason=Reason.WEIGHTS_MISSING, detail="model.gguf is gone", node="n1")


def placed(state: FleetState, now: float = 3.0) -> FleetState:
    return commit(state, plan(state, now), now)


def changed(state: FleetState, replica: str, to: ReplicaState, **more: object) -> FleetState:
    event = ReplicaEvent.model_validate(
        {"replica": replica, "generation": state.replicas[replica].generation, "state": to, **more}
    )
    return replica_changed(state, event, 4.0)


def serving() -> FleetState:
    state = placed(fleet({"n1": inventory()}, spec("m")))
    return changed(
        state, "m-0", ReplicaState.SERVING, endpoint="http://127.0.0.1:21000", trace=f"00-{TRACE}-00f067aa0ba902b7-01"
    )


def test_a_node_as_json() -> None:
    [view] = node_views(serving())
    assert view.model_dump(mode="json") == {
        "id": "n1",
        "state": "ready",
        "since": 1.0,
        "drain_until": 0.0,
        "cause": "",
        "address": "127.0.0.1",
        "cpus": 1,
        "devices": [{"uuid": "cpu", "model": "", "total": 16 * GIB, "foreign": 0, "free": 15 * GIB}],
        "engines": ["llamacpp 1"],
        "disk_free": 100 * GIB,
        "disk_total": 100 * GIB,
        "replicas": ["m-0"],
        "labels": {},
        "roles": [],
        "version": "",
    }
    assert node_row(view) == (
        "n1", "ready", "127.0.0.1", "cpu 15 GiB of 16 GiB", "100 GiB", "llamacpp 1", "m-0", "",
    )  # fmt: skip
    assert len(node_row(view)) == len(NODE_COLUMNS)


def test_a_model_as_json() -> None:
    [view] = model_views(serving())
    assert view.model_dump(mode="json") == {
        "name": "m",
        "id": "m",
        "state": "serving",
        "repo": "file:/models/m.gguf",
        "engine": "llamacpp",
        "replicas": 1,
        "scaling": None,
        "serving": 1,
        "serving_old": 0,
        "priority": 50,
        "context_length": 2048,
        "memory": GIB,
        "gpus": 0,
        "weights_bytes": GIB,
        "spec_version": 1,
        "waiting": "",
        "failure": None,
    }
    assert model_row(view) == ("m", "serving", "1/1", "llamacpp", "1 GiB", "2048", "file:/models/m.gguf", "")
    assert len(model_row(view)) == len(MODEL_COLUMNS)


def test_a_model_whose_older_version_serves_on_says_so() -> None:
    state = serving()
    newer = state.models["m"].model_copy(update={"spec_version": 2})
    [view] = model_views(state.with_model(newer))
    assert (view.serving, view.serving_old) == (0, 1)
    assert model_row(view)[2] == "0/1 +1 old"


def test_a_replica_as_json() -> None:
    [view] = replica_views(serving())
    assert view.model_dump(mode="json") == {
        "id": "m-0",
        "model": "m",
        "state": "serving",
        "generation": 1,
        "nodes": ["n1"],
        "endpoint": "http://127.0.0.1:21000",
        "load": 0.0,
        "since": 4.0,
        "failure": None,
        "given_up": False,
        "trace": f"00-{TRACE}-00f067aa0ba902b7-01",
        "trace_id": TRACE,
        "doing": "",
    }
    assert replica_row(view) == ("m-0", "m", "serving", "1", "0.0", "n1", "http://127.0.0.1:21000", "")
    assert len(replica_row(view)) == len(REPLICA_COLUMNS)


def test_a_model_that_scales_by_demand_shows_its_numbers() -> None:
    state = fleet({"n1": inventory()}, spec("m", scaling=Scaling(min=0, max=4)))
    [view] = model_views(state.with_model(state.models["m"].model_copy(update={"scaled": 2})))
    assert (view.replicas, view.model_dump()["scaling"]) == (2, {"min": 0, "max": 4})
    assert model_row(view)[2] == "0/2 (0..4)"
    [idle] = model_views(state.with_model(state.models["m"].model_copy(update={"scaled": 0})))
    assert idle.state is ModelState.STOPPED


def test_a_node_that_drains_shows_its_deadline() -> None:
    [view] = node_views(drain_node(serving(), "n1", 60.0, 10.0))
    assert (view.state, view.drain_until) == ("draining", 70.0)
    assert node_row(view)[1] == f"draining until {clock(70.0)}"
    [over] = node_views(cordon(drain_node(serving(), "n1", 60.0, 10.0), "n1", False, 20.0))
    assert (over.state, over.drain_until) == ("ready", 0.0)


def test_a_replica_shows_its_load() -> None:
    state = loaded(serving(), "n1", "i1", (Load(replica="m-0", generation=1, in_flight=3),), 5.0)
    [view] = replica_views(state)
    assert view.load == 3.0
    assert replica_row(view)[REPLICA_COLUMNS.index("LOAD")] == "3.0"


def failed() -> FleetState:
    return changed(serving(), "m-0", ReplicaState.FAILED, failure=CORRUPT)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (fleet({"n1": inventory()}, spec("m")), ModelState.STARTING),
        (serving(), ModelState.SERVING),
        (failed(), ModelState.FAILED),
        (placed(fleet({"n1": inventory(memory=GIB // 2)}, spec("m"))), ModelState.WAITING),
        (remove(serving(), "m"), ModelState.REMOVING),
        (scale(serving(), "m", 0), ModelState.STOPPED),
    ],
    ids=lambda value: str(value) if isinstance(value, ModelState) else "",
)
def test_how_a_model_is_as_a_whole(state: FleetState, expected: ModelState) -> None:
    [view] = model_views(state)
    assert view.state is expected


def test_what_waits_says_why() -> None:
    too_small = model_views(placed(fleet({"n1": inventory(memory=GIB // 2)}, spec("m"))))
    [waiting] = waiting_views(too_small)
    assert waiting.why == "0/1 nodes fit m: 1 memory (need 1 GiB, best free 512 MiB on n1)"
    [given_up] = waiting_views(model_views(failed()))
    assert given_up.why == CORRUPT.sentence
    [replica] = replica_views(failed())
    assert replica.given_up
    assert replica.failure is not None
    assert replica.failure.model_dump() == {
        "reason": "weights_missing",
        "detail": "model.gguf is gone",
        "node": "n1",
        "sentence": CORRUPT.sentence,
    }


def test_a_job_as_json() -> None:
    status = JobStatus(
        job="job/serve/m/1",
        kind=JobKind.SERVE,
        state=JobState.FAILED,
        repo="file:/m.gguf",
        model="m",
        steps=(StepStatus(name="registry", state=StepState.DONE, detail="1 file", started_at=1.0, ended_at=2.0),),
        failure=CORRUPT,
    )
    assert status.model_dump(mode="json") == {
        "job": "job/serve/m/1",
        "kind": "serve",
        "state": "failed",
        "repo": "file:/m.gguf",
        "model": "m",
        "steps": [
            {
                "name": "registry",
                "state": "done",
                "detail": "1 file",
                "progress": "",
                "started_at": 1.0,
                "ended_at": 2.0,
            }
        ],
        "trace": "",
        "trace_id": "",
        "replicas": [],
        "failure": {"reason": "weights_missing", "detail": "model.gguf is gone", "node": "n1", "retry_after_s": 0.0},
        "result": None,
    }


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (StepStatus(name="check", state=StepState.RUNNING, started_at=1.0), "▸ check: running"),
        (
            StepStatus(name="mirror", state=StepState.DONE, detail="copied 94 MiB", started_at=1.0, ended_at=2.5),
            "✓ mirror: done in 1.5 s: copied 94 MiB",
        ),
        (
            StepStatus(name="mirror", state=StepState.RUNNING, progress="1 GiB of 4 GiB, 310 MiB/s", started_at=1.0),
            "▸ mirror: running: 1 GiB of 4 GiB, 310 MiB/s",
        ),
        (StepStatus(name="smoke test", state=StepState.SKIPPED, detail="no"), "- smoke test: skipped: no"),
    ],
)
def test_a_step_as_a_line(step: StepStatus, line: str) -> None:
    assert step_line(step) == line


def test_without_a_terminal_each_change_is_said_once() -> None:
    said: list[str] = []
    progress = LineProgress(said.append)

    def status(*states: StepState) -> JobStatus:
        steps = tuple(StepStatus(name=f"s{at}", state=state) for at, state in enumerate(states))
        return JobStatus(job="j", kind=JobKind.SERVE, state=JobState.RUNNING, steps=steps)

    progress.show(status(StepState.RUNNING, StepState.PENDING))
    progress.show(status(StepState.RUNNING, StepState.PENDING))
    progress.show(status(StepState.DONE, StepState.RUNNING))
    assert said == ["▸ s0: running", "✓ s0: done", "▸ s1: running"]


def test_without_a_terminal_progress_is_said_now_and_then() -> None:
    said: list[str] = []
    now = 0.0
    lines = LineProgress(said.append, clock=lambda: now)

    def show(progress: str, state: StepState = StepState.RUNNING) -> None:
        step = StepStatus(name="mirror", state=state, progress=progress)
        lines.show(JobStatus(job="j", kind=JobKind.SERVE, state=JobState.RUNNING, steps=(step,)), "m: ")

    show("")
    for now in (1.0, 5.0, 10.0, 11.0, 19.0, 20.0):
        show(f"{now:.0f} MiB of 40 MiB")
    show("", StepState.DONE)
    assert said == [
        "m: ▸ mirror: running",
        "m: ▸ mirror: running: 10 MiB of 40 MiB",
        "m: ▸ mirror: running: 20 MiB of 40 MiB",
        "m: ✓ mirror: done",
    ]


@pytest.mark.parametrize(("installed", "text"), [(True, "vllm 0.32.0"), (False, "vllm 0.32.0 (not installed yet)")])
def test_an_engine_says_whether_it_is_installed(installed: bool, text: str) -> None:
    offer = EngineOffer(engine=Engine.VLLM, version="0.32.0", installed=installed)
    [view] = node_views(fleet({"n1": inventory(engines=(offer,))}))
    assert view.engines == (text,)

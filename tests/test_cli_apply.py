"""`ctl apply`, `model plan` and `model explain` against the real workflows, with nodes that have no engines."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.contract import UPDATE_SCALE, ScaleArg
from activities.node_contract import StartShard
from cli.apply import Applied, apply_all, start_all, summary
from cli.home import Home
from cli.models_file import Changes, compare, read_models
from cli.session import Session
from fleet.reasons import Reason, StepError
from fleet.state import Policy, ReplicaState, RestartPolicy
from tests.control import Cell, control_plane
from tests.ctl import Ctl, ctl_of
from tests.light_node import LightNode
from tests.waiting import until

TWO = """\
models:
  - {name: one, repo: file:/models/one.gguf}
  - {name: two, repo: file:/models/two.gguf, replicas: 2}
"""


@pytest.fixture
async def cell(client: Client) -> AsyncIterator[Cell]:
    policy = Policy(restart=RestartPolicy(base_s=0.1, attempts=1))
    async with control_plane(client, policy=policy) as made:
        yield made


@pytest.fixture
def session(cell: Cell, tmp_path: Path) -> Session:
    return Session(cell.client, Home(tmp_path / "home"), cell.name)


@pytest.fixture
async def node(cell: Cell) -> AsyncIterator[LightNode]:
    async with cell.node("n1") as made:
        await made.join()
        yield made


@pytest.fixture
def ctl(cell: Cell, tmp_path: Path) -> Ctl:
    return ctl_of(cell, tmp_path / "ctl")


def written(directory: Path, text: str) -> str:
    path = directory / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


async def applied(
    session: Session, path: Path, text: str, *, prune: bool = False
) -> tuple[Changes, tuple[Applied, ...]]:
    path.write_text(text, encoding="utf-8")
    changes = compare(await session.state(), read_models(path, session.cell), prune=prune)
    return changes, await apply_all(session, changes, lambda name, status: None)


# -- apply ------------------------------------------------------------------------------------------------------------


async def test_apply_serves_and_a_second_one_does_nothing(
    cell: Cell, node: LightNode, ctl: Ctl, tmp_path: Path
) -> None:
    file = written(tmp_path, TWO)
    code, out, err = await ctl.run("apply", "-f", file)
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "2 models: 2 served",
        f"one: one is serving: 1 replica on {node.name}",
        f"two: two is serving: 2 replicas on {node.name}",
    ]
    assert "one: ✓ registry: done" in err
    assert len(node.started) == 3

    jobs = cell.answers.calls.copy()
    code, out, err = await ctl.run("apply", "-f", file)
    assert (code, out, err) == (0, "nothing to do: 2 models are as the file says\n", "")
    assert (cell.answers.calls, len(node.started)) == (jobs, 3)

    code, out, err = await ctl.run("apply", "-f", file, "--json")
    assert (code, err) == (0, "nothing to do: 2 models are as the file says\n")
    assert [(one["model"], one["action"], one["state"]) for one in json.loads(out)] == [
        ("one", "none", "unchanged"),
        ("two", "none", "unchanged"),
    ]


async def test_a_changed_model_is_served_again_and_pruned_ones_go(
    cell: Cell, node: LightNode, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "models.yaml"
    await applied(session, path, TWO)
    changed = "models:\n  - {name: one, repo: file:/models/one.gguf, priority: 80}\n"
    kept, done = await applied(session, path, changed)
    assert [(one.request.name, one.why) for one in kept.serve] == [("one", "priority 50 → 80")]
    assert [(one.model, one.state) for one in done] == [("one", "done")]
    assert set((await cell.state()).models) == {"one", "two"}

    pruned, done = await applied(session, path, changed, prune=True)
    assert pruned.remove == ("two",)
    assert [(one.model, one.action, one.state) for one in done] == [("two", "remove", "done")]
    assert done[0].job.startswith("job/remove/two/")
    assert set((await cell.state()).models) == {"one"}
    assert {ref.replica for ref in node.stopped} == {"two-0", "two-1"}


async def test_what_was_scaled_by_hand_goes_back_to_the_file(
    cell: Cell, node: LightNode, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "models.yaml"
    await applied(session, path, TWO)
    done = await session.update(UPDATE_SCALE, ScaleArg(name="one", replicas=2))
    assert done.sentence == "one is scaled to 2 replicas"
    await cell.replica("one-1", ReplicaState.SERVING)
    changes, _ = await applied(session, path, TWO)
    assert [(one.request.name, one.why) for one in changes.serve] == [("one", "replicas 2 → 1")]
    assert (await cell.state()).models["one"].spec.replicas == 1


async def test_one_that_fails_does_not_keep_the_others(client: Client, tmp_path: Path) -> None:
    async def start(request: StartShard) -> None:
        if request.model == "two":
            raise StepError(Reason.BAD_FLAG, "unrecognized arguments: --fast", node="n1")

    async with control_plane(client, policy=Policy(restart=RestartPolicy(attempts=1))) as cell:
        async with cell.node("n1", start=start) as node:
            await node.join()
            ctl = ctl_of(cell, tmp_path / "ctl")
            code, out, _ = await ctl.run("apply", "-f", written(tmp_path, TWO))
            assert code == 1
            lines = out.splitlines()
            assert lines[0] == f"one: one is serving: 1 replica on {node.name}"
            assert lines[1].startswith("two: failed at placement: ")
            assert lines[2] == "2 models: 1 served, 1 failed"


async def test_without_waiting_the_jobs_are_named(
    cell: Cell, node: LightNode, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(TWO, encoding="utf-8")
    changes = compare(await session.state(), read_models(path, session.cell), prune=False)
    started = await start_all(session, changes)
    assert [(one.model, one.action, one.state, one.sentence) for one in started] == [
        ("one", "serve", "started", "new"),
        ("two", "serve", "started", "new"),
    ]
    for one in started:
        await cell.client.get_workflow_handle(one.job).result()
    assert set((await cell.state()).models) == {"one", "two"}


async def test_a_wrong_file_is_lines_on_stderr(ctl: Ctl, tmp_path: Path) -> None:
    file = written(tmp_path, "models:\n  - {name: a, repo: x/y, replcas: 1}\n  - {name: b, repo: x/y, gpus: many}\n")
    for command in (("apply",), ("apply", "--dry-run"), ("model", "plan")):
        code, out, err = await ctl.run(*command, "-f", file)
        assert (code, out) == (1, "")
        first, second = err.splitlines()
        assert first == f"ctl: {file}:2: models.0.replcas: unknown key; remove it or correct its name"
        assert second.startswith(f"{file}:3: models.1.gpus: Input should be a valid integer")


def test_the_summary_has_what_failed_last() -> None:
    done = (
        Applied(model="a", action="serve", job="job/serve/a/1", state="failed", sentence="failed at check: no"),
        Applied(model="b", action="serve", job="job/serve/b/1", state="done", sentence="b is serving"),
        Applied(model="c", action="remove", job="job/remove/c/1", state="done", sentence="c is removed"),
    )
    assert summary(done, 2) == [
        "b: b is serving",
        "c: c is removed",
        "a: failed at check: no",
        "5 models: 1 served, 1 removed, 1 failed, 2 unchanged",
    ]


# -- plan and explain -------------------------------------------------------------------------------------------------


async def test_a_plan_starts_nothing(cell: Cell, node: LightNode, ctl: Ctl, tmp_path: Path) -> None:
    await cell.run({"repo": "file:/models/low.gguf", "name": "low", "memory": "10GiB", "priority": 10})
    before = await cell.state()
    text = """\
models:
  - {name: high, repo: file:/models/high.gguf, memory: 12GiB, priority: 90}
  - {name: unknown, repo: org/unknown}
"""
    file = written(tmp_path, text)
    code, out, err = await ctl.run("model", "plan", "-f", file)
    assert (code, err) == (0, "")
    unknown = "what it needs is known only once its weights are looked up: say its memory and engine"
    assert out.splitlines()[:8] == [
        "high: new",
        "unknown: new",
        f"unknown is not in this plan: {unknown}, or apply it",
        "",
        "at once:",
        f"  preempt low-0 on {node.name}: high is more important (90 against 10): frees 10 GiB on {node.name}",
        "    its requests may run out, for 30 s at most",
        "  scale up high-0: wanted 1, there are 0",
    ]
    assert f"  scale up high-0 on {node.name}: wanted 1, there are 0" in out.split("then, when that has gone well:")[1]
    code, dry, _ = await ctl.run("apply", "--dry-run", "-f", file)
    assert (code, dry) == (0, out)
    code, out, _ = await ctl.run("model", "plan", "--prune", "-f", written(tmp_path, "models: []\n"), "--json")
    planned = json.loads(out)
    assert set(planned) == {"changes", "unchanged", "unplanned", "passes"}
    assert planned["changes"] == [{"model": "low", "action": "remove", "why": "the file does not have it"}]
    assert [(step["kind"], step["replica"]) for one in planned["passes"] for step in one["steps"]] == [
        ("drain", "low-0")
    ]
    after = await cell.state()
    assert (after.models, after.replicas) == (before.models, before.replicas)


async def test_explain_says_what_would_change_it(cell: Cell, node: LightNode, ctl: Ctl, tmp_path: Path) -> None:
    await cell.run({"repo": "file:/models/x.gguf", "name": "x", "memory": "10GiB", "priority": 60})
    await cell.start({"repo": "file:/models/m.gguf", "name": "m", "memory": "8GiB"})

    async def waits() -> bool:
        state = await cell.state()
        return "m" in state.models and bool(state.models["m"].waiting)

    await until(waits, 30)
    sentence = f"0/1 nodes fit m: 1 memory (need 8 GiB, best free 6 GiB on {node.name})"
    code, out, err = await ctl.run("model", "explain", "m")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:4] == [
        f"last decision: m-0: {sentence}",
        f"waits: {sentence}",
        "",
        f"one more replica now: {sentence}",
    ]
    assert lines[5].split() == [node.name, "refused", "memory", "8", "GiB", "6", "GiB", "16", "GiB"]
    assert lines[-2:] == ["what would change it:", f"  {node.name} lacks 2 GiB: stop x-0 (priority 60, 10 GiB)"]
    code, out, _ = await ctl.run("model", "explain", "m", "--json")
    explained = json.loads(out)
    assert set(explained) == {"model", "waiting", "failure", "last", "now", "more", "ways", "advice"}
    assert explained["ways"][0]["stops"] == ["x-0"]
    code, out, err = await ctl.run("model", "explain", "nobody")
    assert (code, out) == (1, "")
    assert err.startswith("ctl: no model is named nobody; there are: m, x")

"""models.yaml: what is refused and where, and what an apply of it would change."""

import re
from pathlib import Path

import pytest
import yaml

from cli.models_file import Changes, ModelEntry, Serve, compare, read_models
from fleet.spec import Constraints, JobKind, JobRequest, Rollout, Scaling
from fleet.state import FleetState
from fleet.wishes import apply, remove, scale
from runtime.config import ConfigError
from tests.fleets import GIB, fleet, spec

DOCS = Path(__file__).resolve().parent.parent / "docs"

FULL = """\
models:
  - name: chat
    repo: org/chat:Q4_K_M
    engine: llamacpp
    replicas: 2
    priority: 70
    memory: 12GiB
    gpus: 1
    context_length: 8192
    concurrency: 8
    args: [--flash-attn]
    constraints: {labels: {zone: a}, prefer: {disk: nvme}, role: gpu, gpu_model: H100}
    scaling: {min: 0, max: 4, target_in_flight: 2}
    rollout: {max_surge: 0, max_unavailable: 1}
  - name: small
    repo: ./small.gguf
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    chat, small = read_models(written(tmp_path, FULL), "blue")
    assert (chat.cell, chat.kind, chat.name, chat.memory) == ("blue", JobKind.SERVE, "chat", 12 * GIB)
    assert chat.constraints == Constraints(labels={"zone": "a"}, prefer={"disk": "nvme"}, role="gpu", gpu_model="H100")
    assert chat.scaling == Scaling(min=0, max=4, target_in_flight=2)
    assert small == JobRequest(cell="blue", name="small", repo=f"file:{tmp_path}/small.gguf", room_deadline_s=None)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = "models: [{name: a, repo: 'file:sub/a.gguf'}, {name: b, repo: ../b.gguf}, {name: c, repo: 'file:/c.gguf'}]"
    found = [request.repo for request in read_models(written(tmp_path, text), "main")]
    assert found == [f"file:{tmp_path}/sub/a.gguf", f"file:{tmp_path.parent}/b.gguf", "file:/c.gguf"]


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("models:\n  - name: a\n    repo: x/y\n    replcas: 2\n", ["4: models.0.replcas: unknown key; remove it"]),
        ("modles: []\n", ["1: models: Field required", "1: modles: unknown key"]),
        ("", ["1: models: Field required"]),
        ("models:\n  - repo: x/y\n", ["2: models.0.name: Field required"]),
        ("models:\n  - name: a\n", ["2: models.0.repo: Field required"]),
        (
            "models:\n  - name: a\n    repo: x/y\n    memory: 12\n",
            ["4: models.0.memory: 12 bytes are less than any engine takes: name the unit"],
        ),
        ("models:\n  - {name: a, repo: x/y, cell: blue}\n", ["2: models.0.cell: unknown key"]),
        ("models:\n  - {name: a, repo: x/y, kind: remove}\n", ["2: models.0.kind: unknown key"]),
        (
            "models:\n  - name: a\n    repo: x/y\n    replicas: two\n    engine: ollama\n    memory: lots\n",
            [
                "5: models.0.engine: Input should be 'llamacpp', 'vllm' or 'sglang'",
                "4: models.0.replicas: Input should be a valid integer",
                "6: models.0.memory: ",
            ],
        ),
        (
            "models:\n  - name: a\n    repo: x/y\n    scaling:\n      min: 3\n      max: 2\n",
            ["4: models.0.scaling: min 3 is more than max 2"],
        ),
        (
            "models:\n  - name: a\n    repo: x/y\n  - name: a\n    repo: x/z\n",
            ["4: models.1.name: a stands in the file twice, first as models.0: remove one of them"],
        ),
        ("models: {a: 1}\n", ["1: models: Input should be a valid tuple"]),
        ("- name: a\n", ["1: must be keys and values, not list"]),
        ("models: [\n", ["2: not YAML: "]),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, complaints: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_models(path, "main")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(complaints), lines
    for line, complaint in zip(lines, complaints, strict=True):
        assert line.startswith(f"{path}:{complaint}"), line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models(tmp_path / "none.yaml", "main")


def asked(name: str, **more: object) -> JobRequest:
    return JobRequest.model_validate({"name": name, "repo": f"file:/models/{name}.gguf", **more})


def catalog(*requests: JobRequest) -> FleetState:
    state = fleet({})
    for request in requests:
        state, _ = apply(state, spec(request.name or "", replicas=request.replicas, request=request), 2.0)
    return state


def without_name(state: FleetState, name: str) -> FleetState:
    """As if the model had been served without a name: it came from the repo."""
    model = state.models[name]
    request = model.spec.request
    assert request is not None
    bare = model.spec.model_copy(update={"request": request.model_copy(update={"name": None})})
    return state.with_model(model.model_copy(update={"spec": bare}))


A = asked("a")


@pytest.mark.parametrize(
    ("state", "requests", "prune", "expected"),
    [
        (catalog(), [A], False, Changes((Serve(A, "new"),), (), ())),
        (catalog(A), [A], False, Changes((), (), ("a",))),
        (catalog(A), [asked("a", priority=50)], False, Changes((), (), ("a",))),
        (without_name(catalog(A), "a"), [A], False, Changes((), (), ("a",))),
        (catalog(A), [asked("a", cell="blue")], False, Changes((), (), ("a",))),
        (
            catalog(A),
            [asked("a", replicas=2, args=["--x"])],
            False,
            Changes((Serve(asked("a", replicas=2, args=["--x"]), "replicas 1 → 2, args none → ['--x']"),), (), ()),
        ),
        (
            catalog(A),
            [asked("a", scaling={"min": 0, "max": 2})],
            False,
            Changes(
                (
                    Serve(
                        asked("a", scaling={"min": 0, "max": 2}),
                        "scaling none → min=0, max=2, target_in_flight=4.0, cooldown_s=60.0, idle_after_s=600.0",
                    ),
                ),
                (),
                (),
            ),
        ),
        (scale(catalog(A), "a", 3), [A], False, Changes((Serve(A, "replicas 3 → 1"),), (), ())),
        (catalog(A, asked("b")), [A], False, Changes((), (), ("a",))),
        (catalog(A, asked("b")), [A], True, Changes((), ("b",), ("a",))),
        (catalog(A), [], True, Changes((), ("a",), ())),
    ],
    ids=[
        "new",
        "same",
        "same with a default written out",
        "same with its name from the repo",
        "same in another cell",
        "changed",
        "scaling added",
        "scaled by hand",
        "not in the file",
        "not in the file, pruned",
        "an empty file, pruned",
    ],
)
def test_what_an_apply_would_change(
    state: FleetState, requests: list[JobRequest], prune: bool, expected: Changes
) -> None:
    assert compare(state, requests, prune=prune) == expected


def test_what_is_being_removed_is_not_removed_again() -> None:
    state = catalog(A)
    going = state.with_model(state.models["a"].model_copy(update={"removing": True}))
    assert compare(going, [], prune=True).none
    [again] = compare(going, [A], prune=False).serve
    assert again.why == "it is being removed"
    assert remove(state, "a").models == {}


def test_the_example_in_the_docs_shows_every_key() -> None:
    whole, small = read_models(DOCS / "models.yaml", "main")
    example = yaml.safe_load((DOCS / "models.yaml").read_text(encoding="utf-8"))["models"][0]
    assert set(example) == set(ModelEntry.model_fields)
    for key in ("constraints", "scaling", "rollout"):
        assert set(example[key]) == set(type(getattr(whole, key)).model_fields)
    assert small.repo == f"file:{DOCS}/small.gguf"


def test_every_key_is_explained() -> None:
    section = (DOCS / "configuration.md").read_text(encoding="utf-8").split("## models.yaml")[1].split("\n## ")[0]
    keys = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert keys == list(ModelEntry.model_fields)
    for part in (Constraints, Scaling, Rollout):
        for key in part.model_fields:
            assert f"`{key}`" in section

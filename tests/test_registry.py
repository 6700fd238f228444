"""Resolving repos: local files, a stub hub asked by the real huggingface_hub client, and a plain URL."""

import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize
from temporalio.testing import ActivityEnvironment

from activities.contract import MirrorRequest, ResolveRequest
from activities.elsewhere import Elsewhere
from activities.hub import wait_of
from activities.mirror import Mirror
from activities.registry import AWAY_AFTER, Registry
from activities.resolutions import Resolutions
from fleet.reasons import Failure, Reason, StepError
from fleet.spec import Engine, Format, ResolvedModel
from fleet.state import FleetState
from runtime.config import HubConfig, MirrorConfig
from tests.stub_hub import COMMIT, Fault, Hub, stub_hub

GGUF = b"GGUF-for-the-registry-any-bytes-do"
FILES = {"m-Q4_0.gguf": GGUF, "m-Q8_0.gguf": GGUF + b"8", "README.md": b"# m"}
SAFE = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "run.py": b"evil"}


NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stub_hub(FILES) as served:
        yield served


async def no_fleet(cell: str) -> FleetState:
    return FleetState(cell=cell)


async def resolve(
    repo: str, endpoint: str = NOWHERE, token_file: Path | None = None, *, mirror: Path | None = None, **more: Any
) -> ResolvedModel:
    config = HubConfig(endpoint=endpoint, token_file=token_file, tokens=more.pop("tokens", {}))
    attempt = more.pop("attempt", AWAY_AFTER)
    with tempfile.TemporaryDirectory() as directory:
        kept = Resolutions((mirror or Path(directory)).as_uri())
        registry = Registry(config, Elsewhere(kept, no_fleet))
        request = ResolveRequest(repo=repo, **more)
        environment = ActivityEnvironment()
        environment.info = replace(environment.info, attempt=attempt)
        found: ResolvedModel = await environment.run(registry.resolve_model, request)
    return found


async def refused(repo: str, endpoint: str = NOWHERE, token_file: Path | None = None, **more: Any) -> Failure:
    with pytest.raises(StepError) as caught:
        await resolve(repo, endpoint, token_file, **more)
    return caught.value.failure


async def refusal(
    repo: str, endpoint: str = NOWHERE, token_file: Path | None = None, **more: Any
) -> tuple[Reason, str]:
    failure = await refused(repo, endpoint, token_file, **more)
    return failure.reason, failure.detail


# -- files ------------------------------------------------------------------------------------------------------------


async def test_file(tmp_path: Path) -> None:
    path = tmp_path / "My model 100%.gguf"
    path.write_bytes(GGUF)
    found = await resolve(f"file:{path}")
    assert (found.repo, found.format, found.entry) == (f"file:{path}", Format.GGUF, path.name)
    assert [(file.path, file.size, file.sha256, file.url) for file in found.files] == [
        (path.name, len(GGUF), "", path.as_uri())
    ]
    assert len(found.revision) == 12
    assert await resolve(str(path)) == found


async def test_revision_of_a_file_changes_with_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    before = (await resolve(f"file:{path}")).revision
    os.utime(path, ns=(1, 1))
    touched = (await resolve(f"file:{path}")).revision
    path.write_bytes(GGUF + b"x")
    os.utime(path, ns=(1, 1))
    longer = (await resolve(f"file:{path}")).revision
    assert len({before, touched, longer}) == 3


async def test_shards_of_a_file_come_along(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in [*names, "other.gguf"]:
        (tmp_path / name).write_bytes(GGUF)
    found = await resolve(f"file:{tmp_path}/{names[0]}")
    assert [file.path for file in found.files] == names


async def test_directory_like_a_hub_cache(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    model = tmp_path / "snapshot"
    for directory in (blobs, model, model / "loop"):
        directory.mkdir()
    for name, data in SAFE.items():
        (blobs / name).write_bytes(data)
        (model / name).symlink_to(blobs / name)
    (model / "loop" / "again").symlink_to(model)
    os.mkfifo(model / "pipe.safetensors")
    (model / "dangling.safetensors").symlink_to(model / "none")
    found = await resolve(f"file:{model}")
    assert [file.path for file in found.files] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (found.format, found.entry) == (Format.SAFETENSORS, "")


@pytest.mark.parametrize(
    ("make", "reason", "says"),
    [
        (lambda path: None, Reason.REPO_NOT_FOUND, "m.gguf does not exist on the worker"),
        (lambda path: path.mkdir(), Reason.NO_WEIGHTS, "no GGUF and no safetensors"),
        (lambda path: os.mkfifo(path), Reason.BAD_INPUT, "neither a file nor a directory"),
    ],
)
async def test_path_that_is_no_model(tmp_path: Path, make: Callable[[Path], None], reason: Reason, says: str) -> None:
    make(tmp_path / "m.gguf")
    found, detail = await refusal(f"file:{tmp_path}/m.gguf")
    assert (found, says in detail) == (reason, True), detail


async def test_unreadable_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user, and root alone can read everything")
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    path.chmod(0o600)
    for parent in tmp_path.parents[:-2]:  # all that pytest made for itself
        parent.chmod(parent.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        answer = await refusal(f"file:{path}")
    finally:
        os.seteuid(0)
    assert answer == (Reason.WEIGHTS_UNREADABLE, f"{path} cannot be read: Permission denied")


# -- the hub ----------------------------------------------------------------------------------------------------------


async def test_hub_gives_commit_sizes_and_hashes(hub: Hub) -> None:
    found = await resolve("org/name:Q8_0", hub.url)
    assert (found.repo, found.revision, found.entry) == ("hf:org/name", COMMIT, "m-Q8_0.gguf")
    (file,) = found.files
    assert (file.size, len(file.sha256)) == (len(GGUF) + 1, 64)
    assert file.url == f"{hub.url}/org/name/resolve/{COMMIT}/m-Q8_0.gguf"
    assert await resolve(f"hf:org/name@{COMMIT}:Q8_0", hub.url) == found


async def test_hub_safetensors_leave_code_out(hub: Hub) -> None:
    hub.files = dict(SAFE)
    found = await resolve("org/name@main", hub.url)
    assert [(file.path, bool(file.sha256)) for file in found.files] == [
        ("config.json", False),
        ("model.safetensors", True),
        ("tokenizer.json", False),
    ]


async def test_token_is_sent_where_configured_and_never_told(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_very_secret"
    token = tmp_path / "token"
    token.write_text("hf_very_secret\n")
    found = await resolve("org/name:Q4_0", hub.url, token)
    assert "secret" not in found.model_dump_json()
    assert hub.asked("/api/")[-1]["authorization"] == "Bearer hf_very_secret"
    reason, detail = await refusal("org/name:Q4_0", hub.url)
    assert (reason, detail) == (Reason.REPO_FORBIDDEN, f"org/name is gated on {hub.url}, and no token was sent")
    assert "authorization" not in hub.asked("/api/")[-1]


async def test_token_file_that_cannot_be_read(hub: Hub, tmp_path: Path) -> None:
    reason, detail = await refusal("org/name:Q4_0", hub.url, tmp_path / "none")
    assert (reason, detail) == (Reason.TOKEN_UNKNOWN, f"the token file {tmp_path}/none cannot be read by the worker")


@pytest.mark.parametrize(
    ("repo", "reason", "says"),
    [
        ("org/other", Reason.REPO_NOT_FOUND, "org/other is not on http://"),
        ("org/name@v9", Reason.REVISION_NOT_FOUND, "org/name@v9: the repo has no such revision on http://"),
        ("org/name", Reason.NO_WEIGHTS, "2 GGUF variants are there"),
        ("org/name:Q2_K", Reason.NO_WEIGHTS, "no GGUF variant Q2_K"),
        ("not a repo", Reason.BAD_INPUT, "is no repo"),
    ],
)
async def test_hub_says_no(hub: Hub, repo: str, reason: Reason, says: str) -> None:
    found, detail = await refusal(repo, hub.url)
    assert found is reason
    assert says in detail


@pytest.mark.parametrize(
    ("fault", "reason", "says"),
    [
        (Fault("api", 9, status=401), Reason.REPO_FORBIDDEN, ""),
        (Fault("api", 9, status=403), Reason.REPO_FORBIDDEN, "answers 403 for org/name"),
        (Fault("api", 9, status=403, headers={"X-Error-Code": "GatedRepo"}), Reason.REPO_FORBIDDEN, "is gated"),
        (Fault("api", 9, status=404), Reason.REPO_NOT_FOUND, "org/name is not on"),
        (Fault("api", 9, status=429, headers={"Retry-After": "17"}), Reason.HUB_BUSY, "asks to wait 17 s"),
        (Fault("api", 9, status=429), Reason.HUB_BUSY, "too many requests"),
        (Fault("api", 9, status=500), Reason.HUB_UNREACHABLE, "answers 500 for org/name"),
    ],
)
async def test_hub_faults_are_reasons(hub: Hub, fault: Fault, reason: Reason, says: str) -> None:
    hub.faults.append(fault)
    found, detail = await refusal("org/name", hub.url)
    assert found is reason, detail
    assert says in detail
    assert "secret-in-the-body" not in detail


async def test_hub_that_is_not_there() -> None:
    with stub_hub({}) as gone:
        pass
    reason, detail = await refusal("org/name", gone.url)
    assert (reason, detail) == (Reason.HUB_UNREACHABLE, f"{gone.url} does not answer for org/name (ConnectError)")


@pytest.mark.parametrize("path", ["../../etc/passwd.gguf", "/etc/passwd.gguf", "a\\b.gguf"])
async def test_hostile_paths_of_a_repo(hub: Hub, path: str) -> None:
    hub.files = {path: GGUF}
    assert (await refusal("org/name", hub.url))[0] is Reason.BAD_INPUT


async def test_a_token_by_name_and_the_grant_that_is_missing(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_very_secret"
    for name, text in (("good", hub.token), ("poor", "hf_other_secret")):
        (tmp_path / name).write_text(text)
    tokens = {name: tmp_path / name for name in ("good", "poor")}
    found = await resolve("org/name:Q4_0", hub.url, tokens=tokens, token="good")
    assert "secret" not in found.model_dump_json()
    answers = {name: await refusal("org/name:Q4_0", hub.url, tokens=tokens, token=name) for name in ("poor", "none")}
    assert answers == {
        "poor": (
            Reason.REPO_FORBIDDEN,
            f"org/name is gated on {hub.url}, and token poor has not been granted access to it",
        ),
        "none": (Reason.TOKEN_UNKNOWN, "token: server.yaml has no token none; there are: good, poor"),
    }
    pasted = "hf_abcdefghijklmnopqrstuvwxyz012345"
    assert pasted not in (await refusal("org/name:Q4_0", hub.url, tokens=tokens, token=pasted))[1]
    hub.faults.append(Fault("api", status=403))
    reason, detail = await refusal("org/name:Q4_0", hub.url, tokens=tokens, token="good")
    assert (reason, detail) == (
        Reason.REPO_FORBIDDEN,
        f"{hub.url} answers 403 for org/name: token good lacks the grant to read it",
    )


async def test_a_hub_that_asks_to_wait_says_how_long(hub: Hub) -> None:
    hub.faults.append(Fault("api", status=429, headers={"Retry-After": "17"}))
    assert (await refused("org/name", hub.url)).retry_after_s == 17
    theirs = datetime.now(UTC) + timedelta(minutes=10)  # the clocks of hub and worker need not agree
    sent, soon = (format_datetime(theirs + timedelta(seconds=more), usegmt=True) for more in (0, 90))
    assert wait_of({"Date": sent, "Retry-After": soon}) == 90
    assert wait_of({"Retry-After": soon}) == 0
    assert [wait_of({"Retry-After": text}) for text in ("", "soon", "-5")] == [0.0, 0.0, 0.0]


async def test_a_renamed_repo_is_followed(hub: Hub) -> None:
    target = f"{hub.url}/api/models/org/name"
    hub.faults.append(Fault("api", status=307, headers={"Location": target}))
    found = await resolve("org/old-name:Q4_0", hub.url)
    assert found.revision == COMMIT


async def test_away_but_mirrored_goes_on_and_says_so(hub: Hub, tmp_path: Path) -> None:
    first = await resolve("org/name:Q4_0", hub.url, mirror=tmp_path)
    hub.faults.append(Fault("api", 9, status=500))
    assert (await refusal("org/name:Q4_0", hub.url, mirror=tmp_path))[0] is Reason.HUB_UNREACHABLE  # not mirrored yet
    mirror = Mirror(MirrorConfig(path=tmp_path, keep_free=ByteSize(0)), HubConfig(endpoint=hub.url))
    await ActivityEnvironment().run(mirror.mirror_model, MirrorRequest(resolved=first))
    again = await resolve("org/name:Q4_0", hub.url, mirror=tmp_path)
    assert again.model_copy(update={"note": ""}) == first
    assert again.note.startswith(f"{hub.url} answers 500 for org/name: the mirror has it as it was on 20")
    assert (await refusal("org/name:Q8_0", hub.url, mirror=tmp_path))[0] is Reason.HUB_UNREACHABLE
    passing = await refusal("org/name:Q4_0", hub.url, mirror=tmp_path, attempt=1)
    assert passing[0] is Reason.HUB_UNREACHABLE, "it may pass: the hub is asked once more"
    hub.faults.insert(0, Fault("api", status=429, headers={"Retry-After": "17"}))
    assert "the mirror has it" in (await resolve("org/name:Q4_0", hub.url, mirror=tmp_path, attempt=1)).note
    for kept in (tmp_path / ".resolved").iterdir():
        kept.write_text("{")
    assert (await refusal("org/name:Q4_0", hub.url, mirror=tmp_path))[0] is Reason.HUB_UNREACHABLE


async def test_an_engine_gets_its_own_format_of_a_repo_that_has_both(hub: Hub) -> None:
    hub.files = {**SAFE, "m-Q4_0.gguf": GGUF, "pytorch_model.bin": b"\x80\x04evil", "consolidated.safetensors": b"same"}
    chosen = {
        engine: [file.path for file in (await resolve("org/name", hub.url, engine=engine)).files]
        for engine in (None, Engine.VLLM, Engine.LLAMACPP)
    }
    safetensors = ["config.json", "model.safetensors", "tokenizer.json"]
    assert chosen == {None: safetensors, Engine.VLLM: safetensors, Engine.LLAMACPP: ["m-Q4_0.gguf"]}
    hub.files = dict(SAFE)
    assert (await refusal("org/name", hub.url, engine=Engine.LLAMACPP))[1].endswith("no GGUF, only 1 safetensors files")
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"\x80\x04evil", "modeling.py": b"evil"}
    reason, detail = await refusal("org/name", hub.url)
    assert (reason, "only pickled weights, which can run code" in detail) == (Reason.NO_WEIGHTS, True)
    assert hub.asked("pytorch_model.bin") == hub.asked("modeling.py") == []


# -- a URL ------------------------------------------------------------------------------------------------------------


async def test_url(hub: Hub) -> None:
    url = f"{hub.url}/m-Q4_0.gguf"
    found = await resolve(url)
    assert (found.repo, found.entry, found.files[0].size, found.files[0].url) == (url, "m-Q4_0.gguf", len(GGUF), url)
    hub.files["m-Q4_0.gguf"] = GGUF[::-1]
    assert (await resolve(url)).revision != found.revision


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, Reason.REPO_FORBIDDEN),
        (403, Reason.REPO_FORBIDDEN),
        (404, Reason.REPO_NOT_FOUND),
        (429, Reason.HUB_BUSY),
        (500, Reason.HUB_UNREACHABLE),
    ],
)
async def test_url_faults(hub: Hub, status: int, reason: Reason) -> None:
    hub.faults.append(Fault("resolve", 9, status=status))
    assert (await refusal(f"{hub.url}/m.gguf"))[0] is reason


async def test_url_nobody_answers() -> None:
    with stub_hub({}) as gone:
        pass
    assert (await refusal(f"{gone.url}/m.gguf"))[0] is Reason.HUB_UNREACHABLE

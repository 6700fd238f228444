"""Names, revisions, variants and paths as a new user types them: what is meant, or what is wrong in one sentence."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from temporalio.testing import ActivityEnvironment

from activities.contract import ResolveRequest
from activities.registry import Registry
from cli.errors import CtlError, sentence
from cli.model_options import wish
from fleet.reasons import StepError
from fleet.spec import JobKind
from runtime.config import HubConfig
from tests.stub_hub import COMMIT, Hub, stub_hub

FILES = {
    "Smol-Q4_K_M.gguf": b"GGUF4",
    "Smol-Q8_0.gguf": b"GGUF88",
    "sub/Smol-F16.gguf": b"GGUF16",
    "mmproj-F16.gguf": b"x",
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with stub_hub(FILES, repo="Org/Smol-GGUF") as served:
        yield served


async def typed(hub: Hub, text: str) -> str:
    """What ctl and the registry make of it: the file that is taken, or the sentence."""
    try:
        request = wish(JobKind.SERVE, text, {})
        registry = Registry(HubConfig(endpoint=hub.url))
        asked = ResolveRequest(repo=request.repo or "")
        found = await ActivityEnvironment().run(registry.resolve_model, asked)
    except (CtlError, StepError) as error:
        return sentence(error)
    except typer.BadParameter as error:
        return error.message
    return f"{found.entry} at {found.revision[:7]}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Org/Smol-GGUF:Q4_K_M", f"Smol-Q4_K_M.gguf at {COMMIT[:7]}"),
        ("hf:Org/Smol-GGUF:q4_k_m", "Smol-Q4_K_M.gguf at"),
        ("Org/Smol-GGUF@main:Q8_0", "Smol-Q8_0.gguf at"),
        (f"Org/Smol-GGUF@{COMMIT}:F16", "sub/Smol-F16.gguf at"),
        ("  Org/Smol-GGUF:Q8_0 ", "Smol-Q8_0.gguf at"),
        ("Org/Smol-GGUF", "3 GGUF variants are there: name one (`repo:F16`, or the file itself): F16, Q4_K_M, Q8_0"),
        ("Org/Smol-GGUF:Q5", "no GGUF variant Q5 is there; there are: F16, Q4_K_M, Q8_0"),
        ("Org/Smol-GGUF:", "has a variant that is not a name such as Q4_K_M"),
        ("Org/Smol-GGUF@", "has a revision that is not a branch, a tag or a commit"),
        ("Org/Smol-GGUF:Q8_0@main", "has its revision behind its variant: write Org/Smol-GGUF@main:Q8_0"),
        ("hf:Org/Smol-GGUF:Q8_0@main", "write hf:Org/Smol-GGUF@main:Q8_0"),
        ("hf://Org/Smol-GGUF:Q8_0", "has two slashes too many: write hf:Org/Smol-GGUF:Q8_0"),
        ("Org\\Smol-GGUF", "holds a backslash: write a path as file:/path/to/model, and a repo as org/name"),
        ("C:\\models\\m.gguf", "holds a backslash"),
        ("Org/Smol-GGUF@v2:Q8_0", "Org/Smol-GGUF@v2: the repo has no such revision on"),
        ("Org/Smol", "Org/Smol is not on http"),
        ("smol", "smol is not on http"),
        ("https://huggingface.co/Org/Smol-GGUF", "is a page of the hub: write Org/Smol-GGUF"),
        ("huggingface.co/Org/Smol-GGUF", "is a page of the hub: write Org/Smol-GGUF"),
        ("https://huggingface.co/Org/Smol-GGUF/tree/main", "is a page of the hub: write Org/Smol-GGUF@main"),
        ("https://huggingface.co/Org/Smol-GGUF/blob/main/x.gguf", "is a page of the hub: write Org/Smol-GGUF@main"),
        ("https://huggingface.co/Org/Smol-GGUF/blob/main/Smol-Q8_0.gguf", "write Org/Smol-GGUF@main:Q8_0"),
        ("https://huggingface.co/Org/Smol-GGUF?x=1", "must name one .gguf file; a repo on the hub is written org/name"),
        ("https://example.org/models", "must name one .gguf file"),
        ("https://user:secret@example.org/m.gguf", "must name a host and no credentials"),
        ("ftp://example.org/m.gguf", "is no repo: write org/name, hf:org/name@revision, file:/path or https://"),
        ("ollama run llama3", "is no repo"),
        ("Org/Smol GGUF", "is no repo"),
        ("Org/Smol-GGUF/Smol-Q8_0.gguf", "no file Org/Smol-GGUF/Smol-Q8_0.gguf here; a repo"),
        ("org/../name", "is no repo"),
        ("./absent.gguf", "no file ./absent.gguf here; a repo on the hub is org/name"),
        ("absent.gguf", "no file absent.gguf here"),
        ("~/absent.gguf", "no file ~/absent.gguf here"),
        ("/absent/m.gguf", "/absent/m.gguf does not exist on the worker"),
        ("file:absent.gguf", "no file absent.gguf here"),
        ("file:", "does not name an absolute path; write file:/path/to/model"),
        ("file:/", "must name a file or a directory, without `..`"),
        ("s3://bucket", "must name a bucket and a directory or GGUF in it, such as s3://bucket/models/m"),
        ("s3:bucket/m", "is no address: write s3://bucket/m"),
        ("s3://id:secret@bucket/m.gguf", "must hold no credentials: they are the worker's own"),
        ("s3://bucket/a/../m.gguf", "must name a bucket and a directory"),
        ("", "repo is empty: name one, such as org/name"),
        ("  ", "repo is empty"),
    ],
)
async def test_what_a_new_user_types(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = await typed(hub, text)
    assert says in said
    assert "\n" not in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"memory": "12"}, "memory: 12 bytes are less than any engine takes: name the unit, as in 12GiB"),
        ({"memory": "12GiB"}, ""),
        ({"token": "research"}, ""),
        ({"token": "hf_abcdefghijklmnopqrstuvwxyz012345"}, "token: that looks like a token itself"),
        ({"pipeline_parallel": 2}, "pipeline_parallel: 2 stages cannot share 1 device (nodes times GPUs) equally"),
    ],
)
def test_what_was_surely_not_meant(given: dict[str, object], says: str) -> None:
    try:
        wish(JobKind.SERVE, "org/name", given)
        said = ""
    except typer.BadParameter as error:
        said = error.message
    assert said.startswith(says)
    assert bool(said) is bool(says)
    assert "abcdef" not in said

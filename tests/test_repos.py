"""References, names and the choice of files, as tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.reasons import Reason, StepError
from fleet.repos import (
    RepoRef,
    check_path,
    check_paths,
    choose_files,
    default_name,
    file_url,
    parse_repo,
    path_of_url,
    shards_beside,
    weights_id,
)
from fleet.spec import Format, ModelFile, ResolvedModel


def files(*paths: str) -> list[ModelFile]:
    return [ModelFile(path=path, size=1) for path in paths]


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", RepoRef("hf", "Qwen/Qwen2.5-0.5B-Instruct")),
        ("hf:org/name", RepoRef("hf", "org/name")),
        ("hf:org/name@main", RepoRef("hf", "org/name", "main")),
        ("org/name@refs/pr/1", RepoRef("hf", "org/name", "refs/pr/1")),
        ("org/name:Q4_K_M", RepoRef("hf", "org/name", "", "Q4_K_M")),
        ("hf:org/name@abc123:Q4_K_M", RepoRef("hf", "org/name", "abc123", "Q4_K_M")),
        ("gpt2", RepoRef("hf", "gpt2")),
        (" org/name ", RepoRef("hf", "org/name")),
        ("file:/m/x.gguf", RepoRef("file", "/m/x.gguf")),
        ("file:///m/x.gguf", RepoRef("file", "/m/x.gguf")),
        ("/m//x.gguf/", RepoRef("file", "/m/x.gguf")),
        ("/m/100%.gguf", RepoRef("file", "/m/100%.gguf")),
        ("https://h/a/x.gguf", RepoRef("https", "https://h/a/x.gguf")),
        ("https://h:8443/x.GGUF?v=1#top", RepoRef("https", "https://h:8443/x.GGUF?v=1")),
    ],
)
def test_reference_is_taken_apart(text: str, ref: RepoRef) -> None:
    assert parse_repo(text) == ref


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("a/b\n", ""),
        ("a\x00b", "control characters"),
        ("a/b/c", "is no repo"),
        ("../b", "is no repo"),
        ("a..b/c", "is no repo"),
        ("org/name@", "revision"),
        ("org/name@../x", "revision"),
        ("org/name:", "variant"),
        ("ftp://bucket/x", "is no repo"),
        ("file:relative.gguf", "absolute path"),
        ("file:", "absolute path"),
        ("file:/", "must name a file"),
        ("file:/a/../b", "without `..`"),
        ("https:///x.gguf", "must name a host"),
        ("https://h/x.bin", "must name one .gguf file"),
        ("https://user:secret@h/x.gguf", "no credentials"),
        ("./x.gguf", "is no repo"),
    ],
)
def test_wrong_reference_is_refused_in_a_sentence(text: str, says: str) -> None:
    if not says:
        assert parse_repo(text).location == "a/b"
        return
    with pytest.raises(StepError) as caught:
        parse_repo(text)
    assert caught.value.failure.reason is Reason.BAD_INPUT
    assert says in caught.value.failure.detail
    assert "secret" not in caught.value.failure.detail


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        outcome: RepoRef | StepError = parse_repo(text)
    except StepError as error:
        outcome = error
    if isinstance(outcome, StepError):
        assert outcome.failure.reason is Reason.BAD_INPUT
    else:
        assert parse_repo(outcome.repo).location == outcome.location
        assert 1 <= len(default_name(outcome)) <= 250


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/x/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("/x/Llama-3-8B-Q4_K_M-00001-of-00003.gguf", "llama-3-8b"),
        ("/x/gpt-oss-20b-MXFP4.gguf", "gpt-oss-20b"),
        ("/x/phi-3.1.F16.gguf", "phi-3.1"),
        ("/x/My Model", "my model"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b-instruct"),
        ("org/Name-GGUF:Q4_K_M", "name-q4_k_m"),
        ("org/Name-GGUF", "name"),
        ("https://h/a%20b.Q8_0.gguf?x=1", "a b"),
    ],
)
def test_default_name(text: str, name: str) -> None:
    assert default_name(parse_repo(text)) == name


@pytest.mark.parametrize(
    ("paths", "variant", "chosen", "entry"),
    [
        (["m.gguf", "README.md"], "", ["m.gguf"], "m.gguf"),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "Q8_0", ["m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "q8_0", ["m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["m.f16.gguf", "mmproj-m.f16.gguf"], "", ["m.f16.gguf"], "m.f16.gguf"),
        (
            ["q/m-Q8_0-00002-of-00002.gguf", "q/m-Q8_0-00001-of-00002.gguf", "m-Q2_K.gguf"],
            "Q8_0",
            ["q/m-Q8_0-00001-of-00002.gguf", "q/m-Q8_0-00002-of-00002.gguf"],
            "q/m-Q8_0-00001-of-00002.gguf",
        ),
        (["a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"], "UD-Q4_K_XL", ["a-UD-Q4_K_XL.gguf"], "a-UD-Q4_K_XL.gguf"),
        (
            [
                "config.json",
                "model.safetensors",
                "tokenizer.json",
                "pytorch_model.bin",
                "modeling.py",
                "onnx/model.onnx",
            ],
            "",
            ["config.json", "model.safetensors", "tokenizer.json"],
            "",
        ),
        (
            [
                "config.json",
                "consolidated.safetensors",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
            "",
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ],
            "",
        ),
        (["config.json", "model.safetensors", "m-Q4_0.gguf"], "Q4_0", ["m-Q4_0.gguf"], "m-Q4_0.gguf"),
    ],
)
def test_choice(paths: list[str], variant: str, chosen: list[str], entry: str) -> None:
    choice = choose_files(files(*paths), variant)
    assert [file.path for file in choice.files] == chosen
    assert choice.entry == entry
    assert choice.format is (Format.GGUF if entry else Format.SAFETENSORS)


@pytest.mark.parametrize(
    ("paths", "variant", "says"),
    [
        ([], "", "no GGUF and no safetensors: it is empty"),
        (["pytorch_model.bin"], "", "only pickled weights, which can run code (pytorch_model.bin)"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], "", "2 GGUF variants are there: name one"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], "Q2_K", "no GGUF variant Q2_K is there; there are: Q4_0, Q8_0"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "not one of them but several"),
        (["a-00001-of-00002.gguf"], "", "1 of 2 shards are there"),
        (["model.safetensors"], "", "no config.json"),
    ],
)
def test_no_choice_says_what_there_is(paths: list[str], variant: str, says: str) -> None:
    with pytest.raises(StepError) as caught:
        choose_files(files(*paths), variant)
    assert caught.value.failure.reason is Reason.NO_WEIGHTS
    assert says in caught.value.failure.detail


HOSTILE = [
    "",
    "/etc/x",
    "../x",
    "a/../../x",
    "a//b",
    "a/./b",
    "a\\b",
    "a\nb",
    "a\x00",
    "x" * 300,
    "a/" * 600 + "b",
    "\u202ex",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_path_is_refused(path: str) -> None:
    with pytest.raises(StepError) as caught:
        check_path(path)
    assert caught.value.failure.reason is Reason.BAD_INPUT


@pytest.mark.parametrize("path", ["m.gguf", "a/b/c.json", "..a", "a..b", "ü.gguf", "with space"])
def test_plain_path_is_taken(path: str) -> None:
    check_path(path)
    assert path_of_url(file_url("file:///m/dir", path)) == f"/m/dir/{path}"


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"], ["a/b/c", "a/b"]])
def test_paths_that_exclude_each_other_are_refused(paths: list[str]) -> None:
    with pytest.raises(StepError, match="file path 'a"):
        check_paths(paths)


def test_weights_ids_are_safe_and_differ() -> None:
    def resolved(repo: str, revision: str, entry: str = "") -> ResolvedModel:
        return ResolvedModel(repo=repo, revision=revision, format=Format.GGUF, entry=entry, files=())

    ids = [
        weights_id(resolved("hf:org/name", "a" * 40)),
        weights_id(resolved("hf:org/name", "b" * 40)),
        weights_id(resolved("hf:org/Name", "a" * 40)),
        weights_id(resolved("hf:org/name", "a" * 40, "m-Q4_0.gguf")),
        weights_id(resolved("hf:org/name", "a" * 40, "m-Q8_0.gguf")),
        weights_id(resolved("file:/" + "x" * 500, "0123456789ab")),
        weights_id(resolved("file:/../..", "../../../etc")),
    ]
    assert len(set(ids)) == len(ids)
    assert all(set(each) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and len(each) < 128 for each in ids)


def test_shards_beside() -> None:
    others = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "n-00001-of-00002.gguf", "m.gguf"]
    assert shards_beside("m-00001-of-00002.gguf", others) == others[:2]
    assert shards_beside("m.gguf", others) == ["m.gguf"]

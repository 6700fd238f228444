"""Weights on the node: local first, else from the mirror, whole or not there."""

import os
from pathlib import Path

import pytest

from agent.weights import WeightStore
from fleet.reasons import Reason, StepError
from fleet.spec import Format, Weights
from tests.fake_engines.node import weights_of


def mirrored(tmp_path: Path, content: bytes = b"GGUF" + bytes(5000)) -> Weights:
    directory = tmp_path / "mirror" / "tiny-abc"
    directory.mkdir(parents=True)
    (directory / "my model.gguf").write_bytes(content)
    return weights_of(directory, "my model.gguf")


async def test_fetched_once_then_local(tmp_path: Path) -> None:
    weights, store = mirrored(tmp_path), WeightStore(tmp_path / "weights", 0)
    seen: list[tuple[int, int]] = []
    assert not store.has(weights)
    first = await store.bring(weights, lambda done, total: seen.append((done, total)))
    assert (first.outcome, first.copied_bytes, first.directory) == ("mirror", 5004, tmp_path / "weights" / "tiny-abc")
    assert seen[-1] == (5004, 5004)
    assert store.has(weights)
    second = await store.bring(weights, lambda done, total: None)
    assert (second.outcome, second.copied_bytes) == ("local", 0)
    assert store.held() == ("tiny-abc",)
    assert (first.directory / "my model.gguf").read_bytes()[:4] == b"GGUF"


async def test_a_wrong_hash_leaves_nothing(tmp_path: Path) -> None:
    weights, store = mirrored(tmp_path), WeightStore(tmp_path / "weights", 0)
    wrong = weights.model_copy(update={"files": (weights.files[0].model_copy(update={"sha256": "0" * 64}),)})
    with pytest.raises(StepError) as caught:
        await store.bring(wrong, lambda done, total: None)
    assert caught.value.failure.reason is Reason.WEIGHTS_CORRUPT
    assert store.held() == ()
    assert not (tmp_path / "weights" / "tiny-abc").exists()


async def test_a_mirror_without_the_file(tmp_path: Path) -> None:
    weights, store = mirrored(tmp_path), WeightStore(tmp_path / "weights", 0)
    (tmp_path / "mirror" / "tiny-abc" / "my model.gguf").unlink()
    with pytest.raises(StepError) as caught:
        await store.bring(weights, lambda done, total: None)
    assert caught.value.failure.reason is Reason.WEIGHTS_MISSING
    assert store.held() == ()


async def test_a_full_disk(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    store = WeightStore(tmp_path / "weights", status.f_frsize * status.f_blocks)
    with pytest.raises(StepError) as caught:
        await store.bring(mirrored(tmp_path), lambda done, total: None)
    assert caught.value.failure.reason is Reason.DISK
    assert store.held() == ()


@pytest.mark.parametrize("model_id", ["", "..", "../x", "a/b", "/etc", ".hidden", "a\n"])
async def test_an_id_that_is_no_plain_name_is_refused(tmp_path: Path, model_id: str) -> None:
    store = WeightStore(tmp_path / "weights", 0)
    weights = Weights(model_id=model_id, format=Format.GGUF, entry="x", files=(), mirror="file:///x")
    with pytest.raises(StepError) as caught:
        await store.bring(weights, lambda done, total: None)
    assert caught.value.failure.reason is Reason.BAD_INPUT


def test_what_is_half_there_is_not_held(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights", 0)
    assert store.held() == ()
    for name in ("a", "b.partial"):
        (tmp_path / "weights" / name).mkdir(parents=True)
    (tmp_path / "weights" / "b.partial" / ".llmgw.json").write_text("{}")
    assert store.held() == ()


async def test_a_file_that_was_cut_is_not_local(tmp_path: Path) -> None:
    weights, store = mirrored(tmp_path), WeightStore(tmp_path / "weights", 0)
    got = await store.bring(weights, lambda done, total: None)
    os.truncate(got.directory / "my model.gguf", 100)
    assert not store.has(weights)
    again = await store.bring(weights, lambda done, total: None)
    assert (again.outcome, again.copied_bytes) == ("mirror", 5004)
    assert (got.directory / "my model.gguf").stat().st_size == 5004

"""Two hashes of the same bytes: what is unknown is made, and what is known by BLAKE3 is verified by that alone."""

import hashlib
from pathlib import Path

import pytest
from blake3 import blake3

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime import manifest
from runtime.hashes import Hashes, Hashing, same_bytes
from runtime.sources import FileSource
from runtime.transfer import Fetched, fetch, verified
from tests.transfers import MIB, content, holds, nothing, write

BYTES = content("weights", 9 * MIB + 5)
SHA256, BLAKE3 = hashlib.sha256(BYTES).hexdigest(), blake3(BYTES).hexdigest()
PLAIN = ModelFile(path="model.gguf", size=len(BYTES))
WRONG = "0" * 64


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", {PLAIN.path: BYTES})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here" / "m"


def known(**hashes: str) -> ModelFile:
    return PLAIN.model_copy(update=hashes)


async def bring(file: ModelFile, source: Path, target: Path) -> Fetched:
    there = FileSource("mirror", str(source), lambda one: source / one.path)
    return await fetch([file], [there], target, keep_free=0, progress=nothing)


@pytest.mark.parametrize("file", [PLAIN, known(sha256=SHA256)], ids=["nothing known", "the hub's"])
async def test_what_is_unknown_is_noted(file: ModelFile, source: Path, target: Path) -> None:
    fetched = await bring(file, source, target)
    assert fetched.files == (known(sha256=SHA256, blake3=BLAKE3),)
    assert manifest.read(target) == {PLAIN.path: known(sha256=SHA256, blake3=BLAKE3)}


async def test_blake3_is_verified_alone(source: Path, target: Path) -> None:
    """The SHA-256 beside it is only carried along: it names the file among nodes."""
    file = known(sha256=WRONG, blake3=BLAKE3)
    fetched = await bring(file, source, target)
    assert fetched.files == (file,)
    assert Hashing(file).found().sha256 == ""


async def test_wrong_bytes_are_found_by_blake3(source: Path, target: Path) -> None:
    with pytest.raises(StepError) as caught:
        await bring(known(sha256=SHA256, blake3=WRONG), source, target)
    assert caught.value.failure.reason is Reason.WEIGHTS_CORRUPT
    detail = f"model.gguf has the BLAKE3 {BLAKE3[:12]}…, {WRONG[:12]}… is expected (from {source})"
    assert caught.value.failure.detail == detail
    assert not target.exists()


async def test_what_a_killed_fetch_left_is_taken_up_by_blake3(source: Path, target: Path) -> None:
    file = known(sha256=SHA256, blake3=BLAKE3)
    parts = target.with_name("m.partial") / ".llmgw-parts"
    parts.mkdir(parents=True)
    (parts / hashlib.sha256(file.path.encode()).hexdigest()[:32]).write_bytes(BYTES[: 5 * MIB])
    fetched = await bring(file, source, target)
    assert fetched.copied_bytes == len(BYTES) - 5 * MIB
    assert holds(target, {PLAIN.path: BYTES})


@pytest.mark.parametrize(
    ("recorded", "wanted", "counts"),
    [
        (known(sha256=SHA256, blake3=BLAKE3), PLAIN, True),
        (known(sha256=SHA256), known(sha256=SHA256, blake3=BLAKE3), True),  # from before there were two
        (known(sha256=SHA256, blake3=BLAKE3), known(sha256=SHA256), True),
        (known(sha256=SHA256, blake3=BLAKE3), known(sha256=SHA256, blake3=WRONG), False),
        (known(sha256=SHA256, blake3=BLAKE3), known(sha256=WRONG, blake3=BLAKE3), False),
        (known(blake3=BLAKE3), known(sha256=SHA256, blake3=BLAKE3), False),  # nothing that we wrote
        (known(sha256=SHA256).model_copy(update={"size": 1}), PLAIN, False),
    ],
)
def test_a_manifest_is_held_against_what_is_wanted(
    recorded: ModelFile, wanted: ModelFile, counts: bool, source: Path
) -> None:
    (source / manifest.MANIFEST).write_text(manifest.dump([recorded]))
    assert verified(source, [wanted]) is counts


@pytest.mark.parametrize(
    ("file", "same"),
    [
        (known(sha256=SHA256), True),
        (known(sha256=WRONG), False),
        (known(sha256=SHA256, blake3=BLAKE3), True),
        (known(sha256=SHA256, blake3=WRONG), False),
        (known(sha256=SHA256, path="absent"), False),
    ],
)
async def test_a_local_file_is_known_by_the_quicker_hash(file: ModelFile, same: bool, source: Path) -> None:
    assert await same_bytes(source / file.path, file) is same


def test_pieces_in_order_give_the_hashes_of_the_whole() -> None:
    hashing = Hashing(PLAIN)
    for start in range(0, len(BYTES), MIB):
        hashing.update_here(memoryview(BYTES)[start : start + MIB])
    assert hashing.found() == Hashes(SHA256, BLAKE3)

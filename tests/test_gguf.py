"""GGUF headers: what is read, and how a hostile or broken file is refused."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.gguf import BLOCKS, MAX_ENTRIES, Gguf, read_gguf
from fleet.reasons import Reason, StepError
from tests.ggufs import LLAMA, Strings, gguf, text


def read(data: bytes, size: int | None = None) -> Gguf:
    return read_gguf("m.gguf", len(data) if size is None else size, lambda at, length: data[at : at + length])


def refusal(data: bytes) -> str:
    with pytest.raises(StepError) as caught:
        read(data)
    assert caught.value.failure.reason is Reason.WEIGHTS_UNREADABLE
    return caught.value.failure.detail


def test_header_gives_numbers_and_keeps_no_vocabulary() -> None:
    data = gguf()
    header = read(data)
    assert header.architecture == "llama"
    assert header.of_model("block_count") == 2
    assert header.lengths["tokenizer.ggml.tokens"] == 100
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert (header.tensors, header.parameters, header.extent) == (1, 256, len(data))


def test_values_of_each_kind_come_back() -> None:
    metadata = {
        "general.architecture": "x",
        "a": True,
        "b": -3,
        "c": 0.5,
        "x.heads": (1, 2, 3),
        "d": "é",
        "e": Strings(3),
    }
    header = read(gguf(metadata))
    kept = {key: value for key, value in metadata.items() if key != "e"}
    assert dict(header.metadata) == kept
    assert dict(header.lengths) == {"x.heads": 3, "e": 3}


def test_long_string_and_array_are_skipped() -> None:
    header = read(gguf({**LLAMA, "tokenizer.chat_template": "x" * 5000, "llama.large": tuple(range(2000))}))
    assert header.lengths["tokenizer.chat_template"] == 5000
    assert header.lengths["llama.large"] == 2000
    assert {"tokenizer.chat_template", "llama.large"}.isdisjoint(header.metadata)


@pytest.mark.parametrize(("kind", "block"), sorted(BLOCKS.items()))
def test_extent_counts_blocks_of_each_type(kind: int, block: tuple[int, int]) -> None:
    elements, width = block
    size = 3 * 5 * width
    data = gguf(tensors=(("first", (32,), 0, 128), ("w", (elements * 3, 5), kind, size)))
    assert read(data).extent == len(data)
    assert "is truncated: its header says" in refusal(data[:-1])


def test_truncated_file_says_both_sizes() -> None:
    data = gguf(tensors=(("w", (1024, 1024), 0, 4 * 1024**2),))
    cut = data[:1_000_000]
    assert refusal(cut) == f"m.gguf is truncated: its header says {len(data):,} bytes, it has 1,000,000"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(64), "is not a GGUF file"),
        (b"GGUF", "does not end within its 4 bytes"),
        (gguf(version=1), "has GGUF version 1"),
        (gguf(version=3 << 24), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, MAX_ENTRIES + 1) + bytes(64), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(64), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "bytes in a name"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IQ", 8, 2**40), "bytes in a string"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**40), "strings in 'k'"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "array of the type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**24), "is truncated"),
        (gguf(tensors=(("w", (32,), 4, 128),)), "of type 4, which llama.cpp does not know"),
        (gguf(tensors=(("w", (33,), 2, 128),)), "it is damaged"),
        (gguf(tensors=(("w", (0,), 0, 128),)), "it is damaged"),
        (gguf(tensors=(("w", (2**40, 2**40), 0, 128),)), "it is damaged"),
        (gguf(tensors=(("w", (1, 1, 1, 1, 1), 0, 128),)), "dimensions"),
        (gguf({**LLAMA, "general.alignment": 33}), "alignment 33"),
        (gguf({**LLAMA, "general.alignment": 0}), "alignment 0"),
    ],
)
def test_broken_file_is_refused(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_key_given_twice_is_refused() -> None:
    entry = text("k") + struct.pack("<II", 4, 1)
    assert "'k' twice" in refusal(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry)


def test_a_file_that_claims_a_huge_size_is_read_only_where_it_has_bytes() -> None:
    """The size comes from a file list, the bytes from a disk: they may disagree."""
    with pytest.raises(StepError, match="is truncated"):
        read(gguf()[:200], size=2**40)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tail: bytes) -> None:
    _read_or_refuse(b"GGUF" + struct.pack("<I", 3) + tail)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_read_or_refused(data: st.DataObject) -> None:
    good = bytearray(gguf())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 700))
        good[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    _read_or_refuse(bytes(good))


def _read_or_refuse(data: bytes) -> None:
    reads: list[int] = []

    def counted(at: int, length: int) -> bytes:
        reads.append(length)
        return data[at : at + length]

    try:
        outcome: Gguf | StepError = read_gguf("m.gguf", len(data), counted)
    except StepError as error:
        outcome = error
    if isinstance(outcome, StepError):
        assert outcome.failure.reason is Reason.WEIGHTS_UNREADABLE
        assert len(outcome.failure.detail) < 500
    else:
        assert outcome.extent <= len(data)
    assert max(reads) <= max(len(data), 4)


def reader(path: Path) -> Callable[[int, int], bytes]:
    def read_file(at: int, length: int) -> bytes:
        with path.open("rb") as stream:
            stream.seek(at)
            return stream.read(length)

    return read_file


def test_real_model() -> None:
    model = os.environ.get("LLMGW_TEST_MODEL")
    if not model:
        pytest.skip("LLMGW_TEST_MODEL does not name a GGUF file")
    path = Path(model)
    header = read_gguf(path.name, path.stat().st_size, reader(path))
    assert header.architecture == "llama"
    assert header.of_model("block_count") == 30
    assert header.lengths["tokenizer.ggml.tokens"] == 49152
    assert header.extent == path.stat().st_size

"""Headers of safetensors files: what they hold, what engines keep of it, and hostile ones, refused in a sentence."""

import json
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.reasons import Reason, StepError
from fleet.safetensors import Header, held_bytes, read_safetensors
from tests.headers import TENSOR, safetensors


def read(data: bytes) -> Header:
    return read_safetensors("m.safetensors", len(data), lambda at, length: data[at : at + length])


def tensors(*entries: tuple[str, str, int, int]) -> Header:
    """Of name, type, elements and bytes."""
    found, at = {}, 0
    for name, dtype, elements, size in entries:
        found[name] = {"dtype": dtype, "shape": [elements], "data_offsets": [at, at + size]}
        at += size
    return read(safetensors(found, at))


def test_what_a_header_says() -> None:
    data = safetensors(TENSOR, 16)
    found = read(data)
    assert found.extent == len(data)
    assert [(one.name, one.dtype, one.elements, one.size) for one in found.tensors] == [("w", "F32", 4, 16)]


def entry(**changes: object) -> object:
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not a safetensors file: it starts with b''"),
        (b"GGUF" + bytes(60), "is not a safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "is not a safetensors file"),
        (safetensors(TENSOR, 15), "is truncated: its header says"),
        (struct.pack("<Q", 5000) + b"{", "is truncated: its header alone is 5,000 bytes, it has 9"),
        (safetensors(b"[1]", 0), "header is damaged"),
        (safetensors(b"not json", 0), "header is damaged"),
        (safetensors(b"\xff\xfe{}", 0), "header is damaged"),
        (safetensors(b"[" * 200_000, 0), "header is damaged"),
        (safetensors(b'{"w": ' + b'{"a":' * 100_000, 0), "header is damaged"),
        (safetensors({"w": 3}, 0), "header is damaged"),
        (safetensors({"w": {"data_offsets": [0]}}, 0), "header is damaged"),
        (safetensors(entry(data_offsets=[0, -1]), 0), "impossible offsets"),
        (safetensors(entry(data_offsets=[16, 0]), 16), "impossible offsets"),
        (safetensors(entry(data_offsets=[0, 1.5]), 9), "impossible offsets"),
        (safetensors(entry(data_offsets=[0, 2**70]), 9), "impossible offsets"),
        (safetensors(entry(data_offsets=[True, 16]), 16), "impossible offsets"),
        (safetensors(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,NaN]}}', 16), "impossible offsets"),
        (safetensors(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', 16), "impossible shape"),
        (safetensors(entry(shape=[-4]), 16), "impossible shape"),
        (safetensors(entry(shape=[2**40, 2**40]), 16), "impossible shape"),
        (safetensors(entry(shape=[1] * 17), 16), "impossible shape"),
        (safetensors(entry(shape="4"), 16), "impossible shape"),
        (safetensors(entry(shape=[5]), 16), "has the tensor 'w' of 5 F32 in 16 bytes: it is damaged"),
    ],
    ids=str,
)
def test_hostile_headers_are_refused_in_one_sentence(data: bytes, says: str) -> None:
    with pytest.raises(StepError) as caught:
        read(data)
    assert caught.value.failure.reason is Reason.WEIGHTS_UNREADABLE
    assert says in caught.value.failure.detail
    assert len(caught.value.failure.detail) < 300


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=4))
def test_any_entry_is_read_or_refused(value: object) -> None:
    for key in ("dtype", "shape", "data_offsets"):
        data = safetensors(json.dumps(entry(**{key: value})).encode(), 16)
        with suppress(StepError):
            assert read(data).extent <= len(data)


@pytest.mark.parametrize(
    ("found", "config", "args", "held"),
    [
        (tensors(("w", "F32", 8, 32)), {}, (), 16),  # f32 is computed in two bytes
        (tensors(("w", "F32", 8, 32)), {}, ("--dtype", "float32"), 32),
        (tensors(("w", "BF16", 8, 16)), {}, (), 16),
        (tensors(("w", "F8_E4M3", 8, 8), ("s", "F32", 1, 4)), {"quantization_config": {}}, (), 12),
        (tensors(("q", "I32", 2, 8), ("s", "F16", 2, 4)), {"quantization_config": {}}, (), 12),
        (tensors(("b", "U8", 8, 8), ("s", "U8", 1, 1), ("n", "BF16", 4, 8)), {"quantization_config": {}}, (), 17),
        (tensors(("w", "BF16", 8, 16), ("lm_head.weight", "BF16", 4, 8)), {"tie_word_embeddings": True}, (), 16),
        (tensors(("w", "BF16", 8, 16), ("lm_head.weight", "BF16", 4, 8)), {}, (), 24),
        (
            tensors(("model.layers.1.w", "BF16", 8, 16), ("model.layers.2.w", "BF16", 4, 8)),
            {"num_hidden_layers": 2},  # the third predicts further tokens
            (),
            16,
        ),
    ],
)
def test_what_engines_hold(found: Header, config: dict[str, object], args: tuple[str, ...], held: int) -> None:
    assert held_bytes(found.tensors, config, args) == held

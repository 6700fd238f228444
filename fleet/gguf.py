"""What a GGUF file says about itself: its header, read without trust and without keeping what is large.

The layout is the one in ggml's `docs/gguf.md`, versions 2 and 3, little-endian. The file is hostile until proven
otherwise: every count and length is bounded before it is believed, and nothing is read beyond the header.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet.reasons import Reason, StepError

Value = int | float | bool | str | tuple[int | float | bool, ...]

BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 36),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
    42: (64, 18),  # Q2_0
}
"""Elements and bytes of one block of each tensor type. Read from the engine itself: `ggml_blck_size` and
`ggml_type_size` in xllamacpp 2026.10.11549; 4, 5, 31 to 33 and 36 to 38 were removed from ggml."""

MAX_HEADER = 128 * 1024**2
"""Bytes. The largest vocabularies (256k tokens with their merges) take 15 MB."""
MAX_ENTRIES = 65_536
"""Metadata entries, and tensors: the largest models have some 50 and some 20,000."""
MAX_ARRAY = 64 * 1024**2
MAX_STRINGS = 2 * 1024**2
"""Strings in one array: they are walked one by one, 2 million in about a second."""
MAX_NAME = 65_535
KEPT_STRING = 1024
KEPT_ARRAY = 1024
"""What is longer is skipped and only its length is kept: one value per layer is kept, a vocabulary is not."""
MAX_DIMS = 4
WINDOW = 256 * 1024
"""Bytes read at a time."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class Gguf:
    """A header."""

    name: str
    version: int
    architecture: str
    metadata: Mapping[str, Value]
    """Scalars, short strings and short arrays of numbers, by key."""
    lengths: Mapping[str, int]
    """The number of elements of every array, kept or not."""
    tensors: int
    parameters: int
    """Elements of all tensors."""
    extent: int
    """Bytes the file must have."""
    stored: int
    """Bytes of its tensors, with what pads them."""

    def of_model(self, key: str) -> Value | None:
        """A value under the architecture's own prefix, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_gguf(name: str, size: int, read: Callable[[int, int], bytes]) -> Gguf:
    """Read the header of the file `name` of `size` bytes; `read(offset, length)` gives bytes, fewer at its end.

    Raises StepError(WEIGHTS_UNREADABLE): not a GGUF file, truncated, or absurd.
    """
    cursor = _Cursor(name, size, read)
    magic = read(0, 4)
    if magic != b"GGUF":
        raise _unreadable(name, "is not a GGUF file" if size else "is empty")
    cursor.skip(4)
    version = cursor.number("<I")
    if version not in (2, 3):
        what = "is big-endian" if version in (2 << 24, 3 << 24) else f"has GGUF version {version}"
        raise _unreadable(name, f"{what}; versions 2 and 3, little-endian, can be read")
    tensors = cursor.count("<Q", MAX_ENTRIES, "tensors")
    entries = cursor.count("<Q", MAX_ENTRIES, "metadata entries")
    metadata: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(entries):
        key = cursor.text(MAX_NAME)
        if key in metadata or key in lengths:
            raise _unreadable(name, f"has the metadata key {key[:80]!r} twice")
        _read_value(cursor, key, cursor.number("<I"), metadata, lengths)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 65_536 or alignment & (alignment - 1):
        raise _unreadable(name, f"has the alignment {alignment!r}, which is not a power of two up to 65536")
    end, parameters = 0, 0
    for _ in range(tensors):
        elements, tensor_end = _read_tensor(cursor, alignment)
        end, parameters = max(end, tensor_end), parameters + elements
    start = -(-cursor.offset // alignment) * alignment
    extent = start + end if tensors else cursor.offset
    if extent > size:
        raise _unreadable(name, f"is truncated: its header says {extent:,} bytes, it has {size:,}")
    architecture = metadata.get("general.architecture", "")
    return Gguf(
        name=name,
        version=version,
        architecture=architecture if isinstance(architecture, str) else "",
        metadata=metadata,
        lengths=lengths,
        tensors=tensors,
        parameters=parameters,
        extent=extent,
        stored=end,
    )


class _Cursor:
    """A place in the header, with a window of bytes around it."""

    def __init__(self, name: str, size: int, read: Callable[[int, int], bytes]) -> None:
        self.name = name
        self.offset = 0
        self._size = size
        self._read = read
        self._window = b""
        self._start = 0

    def skip(self, length: int) -> None:
        """Step over bytes without reading them."""
        self._check(length)
        self.offset += length

    def bytes(self, length: int) -> bytes:
        """The next bytes."""
        self._check(length)
        at = self.offset - self._start
        if at < 0 or at + length > len(self._window):
            self._window = self._read(self.offset, min(max(length, WINDOW), self._size - self.offset))
            self._start, at = self.offset, 0
            if len(self._window) < length:
                raise self._truncated()
        self.offset += length
        return self._window[at : at + length]

    def number(self, form: str) -> int:
        """The next integer."""
        return int(struct.unpack(form, self.bytes(struct.calcsize(form)))[0])

    def count(self, form: str, most: int, what: str) -> int:
        """The next integer, refused where it is absurd."""
        value = self.number(form)
        if value > most:
            raise _unreadable(self.name, f"says it has {value:,} {what}, more than {most:,}: it is damaged")
        return value

    def text(self, most: int) -> str:
        """The next string."""
        length = self.count("<Q", most, "bytes in a name")
        return self.bytes(length).decode(errors="replace")

    def _check(self, length: int) -> None:
        if self.offset + length > self._size:
            raise self._truncated()
        if self.offset + length > MAX_HEADER:
            raise _unreadable(self.name, f"has a header of more than {MAX_HEADER:,} bytes: it is damaged")

    def _truncated(self) -> StepError:
        return _unreadable(self.name, f"is truncated: its header does not end within its {self._size:,} bytes")


def _read_value(cursor: _Cursor, key: str, kind: int, metadata: dict[str, Value], lengths: dict[str, int]) -> None:
    if kind in _SCALARS:
        form = _SCALARS[kind]
        metadata[key] = struct.unpack(form, cursor.bytes(struct.calcsize(form)))[0]
    elif kind == _STRING:
        length = cursor.count("<Q", MAX_HEADER, "bytes in a string")
        if length <= KEPT_STRING:
            metadata[key] = cursor.bytes(length).decode(errors="replace")
        else:
            cursor.skip(length)
            lengths[key] = length
    elif kind == _ARRAY:
        _read_array(cursor, key, metadata, lengths)
    else:
        raise _unreadable(cursor.name, f"has a value of the unknown type {kind} at {key[:80]!r}: it is damaged")


def _read_array(cursor: _Cursor, key: str, metadata: dict[str, Value], lengths: dict[str, int]) -> None:
    kind = cursor.number("<I")
    if kind == _STRING:
        length = cursor.count("<Q", MAX_STRINGS, f"strings in {key[:80]!r}")
        for _ in range(length):
            cursor.skip(cursor.count("<Q", MAX_HEADER, "bytes in a string"))
    elif kind in _SCALARS:
        form = _SCALARS[kind]
        length = cursor.count("<Q", MAX_ARRAY, f"values in {key[:80]!r}")
        width = struct.calcsize(form)
        if length <= KEPT_ARRAY:
            metadata[key] = struct.unpack(f"<{length}{form[1]}", cursor.bytes(length * width))
        else:
            cursor.skip(length * width)
    else:
        raise _unreadable(cursor.name, f"has an array of the type {kind} at {key[:80]!r}: it is damaged")
    lengths[key] = length


def _read_tensor(cursor: _Cursor, alignment: int) -> tuple[int, int]:
    """Elements, and where its bytes end after the start of the data."""
    name = cursor.text(MAX_NAME)[:80]
    dims = [cursor.number("<Q") for _ in range(cursor.count("<I", MAX_DIMS, f"dimensions in {name!r}"))]
    kind = cursor.number("<I")
    offset = cursor.number("<Q")
    if kind not in BLOCKS:
        raise _unreadable(cursor.name, f"has the tensor {name!r} of type {kind}, which llama.cpp does not know")
    block, width = BLOCKS[kind]
    row = dims[0] if dims else 1
    elements = 1
    for dim in dims:
        elements *= dim
    if row % block or not 0 < elements < 2**48 or offset % alignment:
        raise _unreadable(cursor.name, f"has the tensor {name!r} of shape {dims} at {offset:,}: it is damaged")
    return elements, offset + elements // block * width


def _unreadable(name: str, wrong: str) -> StepError:
    return StepError(Reason.WEIGHTS_UNREADABLE, f"{name} {wrong}")

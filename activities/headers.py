"""A model's shape from the headers of its files, read in places wherever they lie; nothing is downloaded for it."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from fleet.gguf import read_gguf
from fleet.reasons import Reason, StepError
from fleet.safetensors import held_bytes, read_safetensors, spread_of
from fleet.shape import ModelShape
from fleet.shape_config import shape_from_config
from fleet.shape_gguf import shape_from_gguf
from fleet.spec import Format, ModelFile
from runtime.mirrors import Reader
from runtime.sources import Ranged

T = TypeVar("T")

Opening = Callable[[ModelFile], AbstractContextManager[Reader]]
"""Opens a file of the model to be read in places."""

MAX_CONFIG = 4 * 1024**2
"""Bytes of a config.json: they have a few thousand."""
AT_ONCE = 8
"""Headers read at the same time: a model of a hundred files on a hub takes seconds instead of a minute."""
READ_AHEAD = 1024**2
"""Bytes asked for at once from a source: a header is read in many small pieces."""
READ_TIMEOUT_S = 60.0
"""Of one piece: twice what a source waits for one answer, and well within what the check may take."""


class Files(Protocol):
    """What is read: `Weights` and `ResolvedModel` are both such."""

    @property
    def format(self) -> Format:
        """How they are stored."""
        ...

    @property
    def entry(self) -> str:
        """The GGUF, or its first shard."""
        ...

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """All of them."""
        ...


def read_shape(model: Files, opened: Opening, args: tuple[str, ...] = ()) -> ModelShape:
    """What the files say; each weight file must be as long as its header says.

    Raises StepError: WEIGHTS_UNREADABLE, WEIGHTS_MISSING, UNSUPPORTED_ARCHITECTURE (an adapter, a projector), and what
    `opened` raises.
    """
    return _of_gguf(model, opened) if model.format is Format.GGUF else _of_config(model, opened, args)


def of_source(source: Ranged, loop: asyncio.AbstractEventLoop) -> Opening:
    """Files of a source, read from threads other than that of its event loop."""

    @contextmanager
    def opened(file: ModelFile) -> Iterator[Reader]:
        yield _SourceReader(source, loop, file)

    return opened


class _SourceReader:
    def __init__(self, source: Ranged, loop: asyncio.AbstractEventLoop, file: ModelFile) -> None:
        self._source = source
        self._loop = loop
        self._file = file
        self._start, self._window = 0, b""
        self.size = file.size

    def at(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        end = offset + length
        if length and not (self._start <= offset and end <= self._start + len(self._window)):
            self._window = self._read(offset, min(self.size, max(end, offset + READ_AHEAD)) - offset)
            self._start = offset
        return self._window[offset - self._start : end - self._start]

    def _read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        view = memoryview(buffer)
        done = 0
        while done < length:
            piece = self._source.read(self._file, offset + done, view[done:])
            reading = asyncio.run_coroutine_threadsafe(piece, self._loop)
            try:
                done += reading.result(READ_TIMEOUT_S)
            except TimeoutError as error:
                reading.cancel()
                late = f"{self._source.name} gave nothing of {self._file.path} for {READ_TIMEOUT_S:.0f} s"
                raise StepError(Reason.HUB_UNREACHABLE, late) from error
        return bytes(buffer)


def _of_gguf(model: Files, opened: Opening) -> ModelShape:
    headers = _each(opened, [file for file in model.files if _is(file, ".gguf")], read_gguf)
    if model.entry not in headers:
        raise StepError(Reason.WEIGHTS_MISSING, f"{model.entry or 'the GGUF'} is not among the model's files")
    entry = headers[model.entry]
    if not sum(header.tensors for header in headers.values()):
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{model.entry} holds no tensors")
    kind = entry.metadata.get("general.type", "model")
    if kind != "model":
        raise StepError(Reason.UNSUPPORTED_ARCHITECTURE, f"{model.entry} is of type {str(kind)[:40]}, not a model")
    return shape_from_gguf(entry, sum(header.stored for header in headers.values()))


def _of_config(model: Files, opened: Opening, args: tuple[str, ...]) -> ModelShape:
    headers = _each(opened, [file for file in model.files if _is(file, ".safetensors")], read_safetensors)
    config = _config(model, opened)
    tensors = [tensor for header in headers.values() for tensor in header.tensors]
    shape = shape_from_config(config, held_bytes(tensors, config, args))
    spread = spread_of(tensors, config, args)
    return replace(shape, spread=spread if spread is not None and len(spread.layers) == len(shape.layers) else None)


def _config(model: Files, opened: Opening) -> Mapping[str, object]:
    file = next((one for one in model.files if one.path == "config.json"), ModelFile(path="config.json", size=0))
    with opened(file) as reader:
        text = reader.at(0, MAX_CONFIG + 1)
    try:
        config = json.loads(text) if len(text) <= MAX_CONFIG else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise StepError(Reason.WEIGHTS_UNREADABLE, "config.json is not a JSON object")
    return config


def _each(
    opened: Opening, files: list[ModelFile], parse: Callable[[str, int, Callable[[int, int], bytes]], T]
) -> dict[str, T]:
    def one(file: ModelFile) -> T:
        with opened(file) as reader:
            return parse(file.path.rpartition("/")[2], reader.size, reader.at)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip([file.path for file in files], pool.map(one, files), strict=True))


def _is(file: ModelFile, suffix: str) -> bool:
    return file.path.lower().endswith(suffix)

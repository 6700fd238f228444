"""What the tests of transfers share: files with known bytes, a short call of `fetch`, and what it may leave."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.reasons import Reason, StepError
from fleet.repos import file_url, path_of_url
from fleet.spec import ModelFile
from runtime.http_source import HttpSource, host_of
from runtime.manifest import MANIFEST
from runtime.sources import FileSource, Source
from runtime.transfer import Fetched, fetch

MIB = 1024**2


def content(name: str, size: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(size)


def listed(data: dict[str, bytes], *, hashes: bool = True) -> list[ModelFile]:
    return [
        ModelFile(path=path, size=len(each), sha256=hashlib.sha256(each).hexdigest() if hashes else "")
        for path, each in data.items()
    ]


def write(root: Path, data: dict[str, bytes]) -> Path:
    for path, each in data.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(each)
    return root


def holds(directory: Path, data: dict[str, bytes]) -> bool:
    found = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if not p.is_dir()} - {MANIFEST}
    return found == set(data) and all((directory / path).read_bytes() == each for path, each in data.items())


def nothing(done: int, total: int) -> None:
    assert 0 <= done <= total


DATA = {"model.gguf": content("a", 9 * MIB + 17), "sub dir/100%.json": content("b", 1000), "empty.json": b""}


async def bring(
    data: dict[str, bytes],
    base: str,
    directory: Path,
    *,
    hashes: bool = True,
    keep_free: int = 0,
    progress: Callable[[int, int], None] = nothing,
) -> Fetched:
    source = source_at(base)
    try:
        return await fetch(listed(data, hashes=hashes), [source], directory, keep_free=keep_free, progress=progress)
    finally:
        await source.close()


def source_at(base: str) -> Source:
    """The directory or server at a URL, as a mirror."""
    if base.startswith("file:"):
        root = Path(path_of_url(base))
        return FileSource("mirror", str(root), lambda file: root / file.path)
    return HttpSource("mirror", host_of(base), lambda file: file_url(base, file.path))


async def failure(work: "asyncio.Future[Fetched] | asyncio.Task[Fetched]") -> tuple[Reason, str]:
    with pytest.raises(StepError) as caught:
        await work
    return caught.value.failure.reason, caught.value.failure.detail


def left(directory: Path) -> set[str]:
    """What stands beside and at the directory; lock files stay on purpose."""
    return {path.name for path in directory.parent.iterdir()} - {f"{directory.name}.lock", ".reserve.lock"}

"""The file that says what a directory of weights holds: paths, sizes and hashes, and whether the disk has it all."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleet.spec import ModelFile
from runtime import disk

MANIFEST = ".llmgw.json"
"""Written inside the directory before it appears."""

Recorded = Mapping[str, ModelFile]
"""Files with size and hashes, by path."""


def read(directory: Path) -> Recorded:
    """What stands in the manifest; empty where there is none, it is damaged, or a power cut may have undone it."""
    try:
        return parse((directory / MANIFEST).read_bytes())
    except OSError:
        return {}


def parse(text: bytes) -> Recorded:
    """What a manifest's text says; empty as above."""
    try:
        data = json.loads(text)
        parsed = [ModelFile.model_validate(entry) for entry in data["files"]]
        unsynced = data.get("boot", "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    if unsynced and unsynced != disk.boot():
        return {}
    return {file.path: file for file in parsed}


def proven(directory: Path, files: Sequence[ModelFile]) -> tuple[ModelFile, ...] | None:
    """The files with the hashes in the manifest, or None where one is absent or differs. Nothing is hashed."""
    recorded = read(directory)
    found = []
    for file in files:
        known = recorded.get(file.path)
        if known is None or not agrees(known, file) or disk.regular_size(directory / file.path) != file.size:
            return None
        found.append(file.model_copy(update={"sha256": known.sha256, "blake3": known.blake3}))
    return tuple(found)


def agrees(known: ModelFile, file: ModelFile) -> bool:
    """Whether a recorded file, verified once, can be the one that is wanted."""
    pairs = ((known.sha256, file.sha256), (known.blake3, file.blake3))
    return known.size == file.size and bool(known.sha256) and all(one == two for one, two in pairs if one and two)


def dump(files: Sequence[ModelFile], boot: str = "") -> str:
    """The manifest's text. With `boot`, it counts only as long as the machine runs: see `settle`."""
    entries = [file.model_dump(include={"path", "size", "sha256", "blake3"}) for file in files]
    return json.dumps({"files": entries, "boot": boot} if boot else {"files": entries}, indent=1)


def settle(directory: Path) -> None:
    """Bring all files to the disk, then let the manifest count for good. A directory that went meanwhile is left.

    All names are taken relative to the directory as it is now: what is put in its place meanwhile is not touched.
    """
    recorded = read(directory)
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        parents = {""}
        for path in recorded:
            _sync(path, root)
            parts = path.split("/")
            parents.update("/".join(parts[:end]) for end in range(1, len(parts)))
        for parent in sorted(parents, reverse=True):
            _sync(parent or ".", root)
        _write(root, dump(list(recorded.values())))
        os.fsync(root)
    except FileNotFoundError:
        return
    finally:
        os.close(root)
    disk.sync(directory.parent)


def _sync(path: str, root: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(root: int, text: str) -> None:
    name = f"{MANIFEST}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o644, dir_fd=root)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(descriptor)
    os.replace(name, MANIFEST, src_dir_fd=root, dst_dir_fd=root)

"""The Hugging Face cache of this machine, as a place where a model's files may already be."""

from collections.abc import Iterator
from pathlib import Path

from fleet.spec import ModelFile
from runtime.disk import regular_size


class HubCache:
    """Looks, and changes nothing: whether a file is the right one, its hash says."""

    def __init__(self, root: Path | None) -> None:
        self._root = root

    def find(self, file: ModelFile) -> list[Path]:
        """Regular files that may be it: the blob named by its hash, else what snapshots have under its path."""
        if not file.sha256:
            return []
        blobs = [path for repo in self._repos() if regular_size(path := repo / "blobs" / file.sha256) == file.size]
        if blobs:
            return blobs[:1]
        found: dict[Path, None] = {}
        for repo in self._repos():
            for snapshot in _children(repo / "snapshots"):
                path = (snapshot / file.path).resolve()
                if regular_size(path) == file.size:
                    found[path] = None
        return list(found)

    def _repos(self) -> Iterator[Path]:
        if self._root is not None:
            yield from (path for path in _children(self._root) if path.name.startswith("models--"))


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []

"""What this node can give to others: the files it has whole, and those that grow, by their hash."""

import threading
from dataclasses import dataclass
from pathlib import Path

from runtime import manifest
from runtime.manifest import MANIFEST


@dataclass(frozen=True)
class Offer:
    """A file others may read."""

    path: Path
    have: int
    """Bytes from its beginning that are there."""
    size: int
    """Bytes when it is whole."""


class Offers:
    """By SHA-256, so that nobody can ask for a path. Asked from the server's threads, changed from the event loop."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._guard = threading.Lock()
        self._whole: dict[str, Offer] = {}
        self._growing: dict[str, Offer] = {}
        self._models: dict[str, Path] = {}

    def scan(self) -> None:
        """Take up what an earlier agent has fetched."""
        if self._root.is_dir():
            for path in sorted(self._root.glob(f"*/{MANIFEST}")):
                self.add(path.parent)

    def add(self, directory: Path) -> None:
        """A model is here whole."""
        found = {
            known.sha256: Offer(directory / name, known.size, known.size)
            for name, known in manifest.read(directory).items()
        }
        with self._guard:
            self._whole.update(found)
            self._models[directory.name] = directory

    def drop(self, directory: Path) -> None:
        """A model goes."""
        with self._guard:
            self._models.pop(directory.name, None)
            self._whole = {
                digest: offer for digest, offer in self._whole.items() if not offer.path.is_relative_to(directory)
            }

    def grow(self, digest: str, path: Path, have: int, size: int) -> None:
        """So much of a file is here."""
        with self._guard:
            self._growing[digest] = Offer(path, have, size)

    def end(self, digest: str) -> None:
        """The fetch that brought it is over."""
        with self._guard:
            self._growing.pop(digest, None)

    def listing(self, name: str) -> str:
        """The files of a model that is here whole, as a manifest; empty where it is not."""
        with self._guard:
            directory = self._models.get(name)
        recorded = manifest.read(directory) if directory is not None else {}
        return manifest.dump(list(recorded.values())) if recorded else ""

    def find(self, digest: str) -> Offer | None:
        """The file with this hash, whole or as far as it is."""
        with self._guard:
            return self._whole.get(digest) or self._growing.get(digest)

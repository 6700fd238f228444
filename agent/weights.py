"""A model's files on this node: found here, or fetched from the mirror, and verified either way."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile, Weights
from runtime.transfer import MANIFEST, fetch, verified

logger = logging.getLogger(__name__)

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_WORKING = (".partial", ".old", ".lock")
"""What `runtime.transfer` appends to a directory's name while it works."""


@dataclass(frozen=True)
class Brought:
    """A model's files, here."""

    directory: Path
    outcome: Literal["local", "mirror"]
    copied_bytes: int


class WeightStore:
    """The node's weights, one directory per `Weights.model_id`; what stands there is whole and verified."""

    def __init__(self, root: Path, keep_free: int) -> None:
        self._root = root
        self._keep_free = keep_free

    def directory(self, weights: Weights) -> Path:
        """Where a model's files are or will be. Raises StepError(BAD_INPUT) for an id that is no plain name."""
        if not _MODEL_ID.fullmatch(weights.model_id):
            raise StepError(Reason.BAD_INPUT, f"{weights.model_id!r} cannot name a directory of weights")
        return self._root / weights.model_id

    def has(self, weights: Weights) -> bool:
        """Whether the files are here: a quick look at manifest and sizes."""
        return verified(self.directory(weights), weights.files)

    async def bring(self, weights: Weights, progress: Callable[[int, int], None]) -> Brought:
        """Have the files here; `progress` is called with done and total bytes.

        Raises StepError, such as DISK_FULL, WEIGHTS_MISSING, WEIGHTS_CORRUPT; cancelling leaves no partial file.
        """
        directory = self.directory(weights)
        if verified(directory, weights.files):
            return Brought(directory, "local", 0)
        base = weights.mirror.rstrip("/")

        def source(file: ModelFile) -> str:
            return f"{base}/{quote(file.path)}"

        try:
            got = await fetch(weights.files, source, directory, keep_free=self._keep_free, progress=progress)
        except StepError as error:
            if error.failure.reason is Reason.DISK_FULL:  # of this node: another may have room
                raise StepError(Reason.DISK, error.failure.detail) from error
            raise
        logger.info("weights fetched model=%s bytes=%d seconds=%.1f", weights.model_id, got.copied_bytes, got.seconds)
        return Brought(directory, "mirror" if got.copied_bytes else "local", got.copied_bytes)

    def held(self) -> tuple[str, ...]:
        """Ids of the models whose files are here whole."""
        if not self._root.is_dir():
            return ()
        return tuple(
            sorted(
                entry.name
                for entry in self._root.iterdir()
                if not entry.name.endswith(_WORKING) and (entry / MANIFEST).is_file()
            )
        )

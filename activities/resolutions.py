"""What repos were resolved to before, kept beside the mirror: for when the hub is away and the mirror has the files."""

import hashlib
import logging
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from fleet.records import Record
from fleet.repos import weights_id
from fleet.spec import ResolvedModel

DIRECTORY = ".resolved"
"""In the mirror; no weights' id begins with a dot."""

log = logging.getLogger("llmgw.registry")


class Resolution(Record):
    """One reference as it was resolved last."""

    asked: str
    resolved: ResolvedModel
    at: float
    """Seconds since the epoch."""

    @property
    def when(self) -> str:
        """For people."""
        return f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%d %H:%M} UTC"


class Resolutions:
    """Kept in the mirror's directory, so that all workers share them."""

    def __init__(self, mirror: Path) -> None:
        self._mirror = mirror

    def keep(self, asked: str, resolved: ResolvedModel, now: float) -> None:
        """Remember it. A mirror that cannot be written is the next step's trouble, which says so."""
        path = self._path(asked)
        text = Resolution(asked=asked, resolved=resolved, at=now).model_dump_json()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as written:
                written.write(text)
            Path(written.name).replace(path)
        except OSError as error:
            log.warning("what %s was resolved to is not kept: %s", asked, error)

    def mirrored(self, asked: str) -> Resolution | None:
        """What it was resolved to last, if the mirror holds those files whole."""
        try:
            found = Resolution.model_validate_json(self._path(asked).read_text(encoding="utf-8"))
        except (OSError, ValidationError, UnicodeDecodeError):
            return None  # never resolved here, or by another version of llmgw: the hub is needed
        # A model's directory appears in the mirror whole or not at all.
        whole = found.asked == asked and (self._mirror / weights_id(found.resolved)).is_dir()
        return found if whole else None

    def _path(self, asked: str) -> Path:
        return self._mirror / DIRECTORY / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"

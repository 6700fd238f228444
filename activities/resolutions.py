"""What repos were resolved to before, kept in the mirror, wherever that is: for when the hub is away."""

import asyncio
import hashlib
import logging
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from fleet.reasons import StepError
from fleet.records import Record
from fleet.repos import path_of_url, weights_id
from fleet.spec import ModelFile, ResolvedModel
from runtime import manifest, notes, shelf
from runtime.mirrors import is_directory, is_web
from runtime.threads import in_thread

DIRECTORY = ".resolved"
"""In the mirror; no weights' id begins with a dot."""

NOTE_S = 10.0
"""For one note, which is some kilobytes: a mirror that takes longer is away, and the next step says so."""

log = logging.getLogger("llmgw.registry")


class Resolution(Record):
    """One reference as it was resolved last."""

    asked: str
    resolved: ResolvedModel
    at: float
    """Seconds since the epoch."""


class Verified(Record):
    """The files of one model as the mirror had them, each with its hash: a hub does not tell those of small files."""

    files: tuple[ModelFile, ...]


class Resolutions:
    """Kept at the mirror's address, so that all workers share them. A mirror that is only read is only read here."""

    def __init__(self, mirror: str) -> None:
        self._mirror = mirror

    async def keep(self, asked: str, resolved: ResolvedModel, now: float) -> None:
        """Remember it. A mirror that cannot be written is the next step's trouble, which says so."""
        await self._write(_name_of(asked), Resolution(asked=asked, resolved=resolved, at=now))

    async def find(self, asked: str) -> Resolution | None:
        """What it was resolved to last; None where it never was, or by another version of llmgw."""
        text = await self._read(_name_of(asked))
        try:
            found = Resolution.model_validate_json(text)
        except ValidationError:
            return None
        return found if found.asked == asked else None

    async def keep_files(self, name: str, files: tuple[ModelFile, ...]) -> None:
        """Remember what the weights of this id are, also when the mirror does not hold them any more."""
        await self._write(name, Verified(files=files))

    async def hashes(self, name: str) -> dict[str, str]:
        """The hashes of that by path; empty where they are not known."""
        text = await self._read(name)
        try:
            return {file.path: file.sha256 for file in Verified.model_validate_json(text).files}
        except ValidationError:
            return {}

    async def mirrored(self, resolved: ResolvedModel) -> bool:
        """Whether the mirror holds these files whole."""
        url = f"{self._mirror}/{weights_id(resolved)}"
        if is_directory(url):
            return await in_thread(manifest.proven, Path(path_of_url(url)), resolved.files) is not None
        try:
            await shelf.look(resolved.files, url)
        except StepError:
            return False  # it lacks them, or is away too
        return True

    async def _write(self, name: str, record: Record) -> None:
        if is_web(self._mirror):
            return
        try:
            async with asyncio.timeout(NOTE_S):
                await notes.write(self._mirror, f"{DIRECTORY}/{name}.json", record.model_dump_json().encode())
        except (StepError, TimeoutError) as error:
            log.warning("what is known of %s is not kept: %s", name, error or "the mirror does not answer")

    async def _read(self, name: str) -> bytes:
        try:
            async with asyncio.timeout(NOTE_S):
                return await notes.read(self._mirror, f"{DIRECTORY}/{name}.json")
        except (StepError, TimeoutError) as error:
            log.warning("what is known of %s cannot be read: %s", name, error or "the mirror does not answer")
            return b""


def when(moment: float) -> str:
    """For people: `2026-11-30 12:00 UTC`."""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC"


def _name_of(asked: str) -> str:
    return hashlib.sha256(asked.encode()).hexdigest()[:32]

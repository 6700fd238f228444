"""Small notes that lie in the mirror beside the models: in its directory, or in its object store."""

from pathlib import Path

import obstore
from obstore.store import LocalStore, ObjectStore

from fleet.reasons import Reason, StepError
from fleet.repos import path_of_url
from runtime.mirrors import is_directory
from runtime.objects import open_store, told


async def write(mirror: str, path: str, data: bytes) -> None:
    """Put a note there; it appears whole. Raises StepError(MIRROR_UNREACHABLE)."""
    with told(f"{mirror}/{path}"):
        await obstore.put_async(_opened(mirror), path, data)


async def read(mirror: str, path: str) -> bytes:
    """What a note says; empty where there is none. Raises StepError(MIRROR_UNREACHABLE)."""
    if is_directory(mirror) and not Path(path_of_url(mirror)).is_dir():
        return b""
    try:
        with told(f"{mirror}/{path}"):
            found = await obstore.get_async(_opened(mirror), path)
            return bytes(await found.bytes_async())
    except StepError as error:
        if error.failure.reason is Reason.WEIGHTS_MISSING:
            return b""
        raise


def _opened(mirror: str) -> ObjectStore:
    # A mirror's directory is made with its first model, and notes come before that.
    return LocalStore(path_of_url(mirror), mkdir=True) if is_directory(mirror) else open_store(mirror)

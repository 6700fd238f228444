"""Object stores behind one address (`s3:`, `gs:`, `az:`), with their credentials from the environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from fleet.reasons import Reason, StepError
from fleet.spec import ModelFile
from runtime.sources import SourceKind

CALL_TIMEOUT = timedelta(seconds=60)
"""Of one request: a range of 4 MiB, or a part of 8 MiB on its way up, at 140 KiB/s."""
RETRY_FOR = timedelta(seconds=20)
RETRIES = 4
"""Then Temporal's retry takes over."""


def open_store(url: str) -> ObjectStore:
    """The store beneath this address. Endpoint, region and credentials are those of the store's usual variables.

    Raises StepError(MIRROR_UNREACHABLE) for an address that is none.
    """
    with told(url):
        return from_url(
            url,
            # The endpoint is the operator's own word, and a store inside a private network often has no certificate.
            client_options={"timeout": CALL_TIMEOUT, "allow_http": True},
            retry_config={"max_retries": RETRIES, "retry_timeout": RETRY_FOR},
        )


@dataclass(frozen=True)
class Stored:
    """One object beneath an address."""

    path: str
    """Relative to the address."""
    size: int
    mark: str
    """Changes with its bytes: the store's tag, else when it was written."""


async def listed(url: str, most: int) -> list[Stored]:
    """What lies beneath an address, by path, at most `most` objects. Raises StepError(MIRROR_UNREACHABLE)."""
    found: list[Stored] = []
    with told(url):
        async for chunk in obstore.list(open_store(url)):
            found += [
                Stored(one["path"], one["size"], one["e_tag"] or one["last_modified"].isoformat()) for one in chunk
            ]
            if len(found) >= most:
                break
    return sorted(found[:most], key=lambda one: one.path)


@contextmanager
def told(subject: str) -> Iterator[None]:
    """What goes wrong with a store, as a StepError: WEIGHTS_MISSING, MIRROR_UNREACHABLE."""
    try:
        yield
    except FileNotFoundError as error:
        raise StepError(Reason.WEIGHTS_MISSING, f"{subject} is not in the mirror") from error
    except (BaseError, OSError, ValueError) as error:
        raise StepError(Reason.MIRROR_UNREACHABLE, f"{subject}: {_first_line(error)}") from error


class StoreSource:
    """A model's files beneath an address in a store."""

    def __init__(self, kind: SourceKind, url: str) -> None:
        self._kind: SourceKind = kind
        self._url = url.rstrip("/")
        self._store = open_store(url)

    @property
    def kind(self) -> SourceKind:
        return self._kind

    @property
    def name(self) -> str:
        return self._url

    async def read(self, file: ModelFile, offset: int, view: memoryview) -> int:
        with told(f"{self._url}/{file.path}"):
            data = await obstore.get_range_async(self._store, file.path, start=offset, length=len(view))
        if len(data) != len(view):
            raise StepError(
                Reason.WEIGHTS_CORRUPT,
                f"{self._url}/{file.path} has {offset + len(data)} bytes, {file.size} are expected",
            )
        view[:] = memoryview(data)
        return len(view)

    async def close(self) -> None:
        """Connections are the store's own."""


def _first_line(error: Exception) -> str:
    """Without what follows: debug output of the library, and answers of the server."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

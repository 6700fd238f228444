"""The bytes of one file from its URL into one local file, hashed as they arrive and resumed after a cut."""

import asyncio
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from fleet.reasons import Reason, StepError
from fleet.repos import path_of_url
from fleet.spec import ModelFile

CHUNK = 4 * 1024**2
"""Bytes a step: large enough that two hops to a thread (0.1 ms) vanish beside hashing (2 ms)."""
HTTP_STEP = 1024**2
"""As above, but the network is the slower part: a smaller step shows progress sooner."""
TRIES = 5
"""Requests in a row that bring no byte: with the waits below, four seconds, then Temporal's retry takes over."""
FIRST_WAIT_S = 0.25
MAX_WAIT_S = 30.0
"""What a hub's Retry-After may cost at most within one attempt."""
TIMEOUT = httpx.Timeout(connect=10.0, read=30.0, write=10.0, pool=10.0)
"""A hub that says nothing for 30 s is asked again; a healthy one streams without such gaps."""

P = ParamSpec("P")
T = TypeVar("T")


class Sink:
    """A local file being written. `size` bytes are in it, and all of them are in its hash."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self.size = 0
        self.kept = 0
        """Bytes that were there before."""

    @classmethod
    async def open(cls, path: Path, *, resume: bool) -> Self:
        """Open for writing; with `resume`, what is there is hashed and kept. A symlink is never followed."""
        if not resume:
            # A new inode: another name of the old one may be mapped by an engine.
            path.unlink(missing_ok=True)
        sink = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
        try:
            await in_thread(sink._hash_kept)
        except BaseException:
            os.close(sink._descriptor)
            raise
        return sink

    async def write(self, chunk: bytes) -> None:
        """Append; the disk and the hash work at the same time."""
        hashing = asyncio.ensure_future(asyncio.to_thread(self._hash.update, chunk))
        try:
            await in_thread(self._append, chunk)
        finally:
            await hashing
        self.size += len(chunk)

    def restart(self) -> None:
        """Begin again at the first byte."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.size = self.kept = 0

    async def sync(self) -> str:
        """Bring everything to the disk; returns the SHA-256 in hex."""
        await in_thread(os.fsync, self._descriptor)
        return self._hash.hexdigest()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _hash_kept(self) -> None:
        while chunk := os.read(self._descriptor, CHUNK):
            self._hash.update(chunk)
            self.size += len(chunk)
        self.kept = self.size

    def _append(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._descriptor, view) :]


async def pull(
    url: str, file: ModelFile, sink: Sink, *, headers: Mapping[str, str], written: Callable[[], None]
) -> None:
    """Bring what is missing of `file` from `url` into the sink; `written` is called after each chunk.

    Raises StepError: WEIGHTS_MISSING, WEIGHTS_CORRUPT (another size than listed), WEIGHTS_UNREADABLE,
    REPO_FORBIDDEN, HUB_UNREACHABLE. OSError means that the sink's disk failed.
    """
    if sink.size > file.size:
        sink.restart()
    if sink.size == file.size:
        return
    if url.startswith("file:"):
        await _copy(Path(path_of_url(url)), file, sink, written)
    elif url.startswith(("http://", "https://")):
        await _download(url, file, sink, headers, written)
    else:
        raise StepError(Reason.WEIGHTS_MISSING, f"{file.path}: its source {url[:200]!r} is no file: or https: URL")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread. A thread cannot be stopped, so a cancelled caller waits until it is done."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True  # the caller closes the descriptor next: not while the thread may still write to it
    if cancelled and not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as lost
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def _copy(source: Path, file: ModelFile, sink: Sink, written: Callable[[], None]) -> None:
    descriptor = await in_thread(_open_source, source, file)
    try:
        os.lseek(descriptor, sink.size, os.SEEK_SET)
        while sink.size < file.size:
            chunk = await in_thread(_read, descriptor, source, min(CHUNK, file.size - sink.size))
            if not chunk:
                raise StepError(Reason.WEIGHTS_CORRUPT, f"{source} shrank to {sink.size} bytes while it was copied")
            await sink.write(chunk)
            written()
    finally:
        os.close(descriptor)


def _open_source(source: Path, file: ModelFile) -> int:
    try:
        # Without O_NONBLOCK, a FIFO in the place of the file would hold the thread for ever.
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
        raise StepError(
            Reason.WEIGHTS_MISSING if gone else Reason.WEIGHTS_UNREADABLE, f"{source} cannot be read: {error.strerror}"
        ) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size == file.size:
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{source} is not a regular file")
    raise StepError(Reason.WEIGHTS_CORRUPT, f"{source} has {status.st_size} bytes, {file.size} are expected")


def _read(descriptor: int, source: Path, length: int) -> bytes:
    try:
        return os.read(descriptor, length)
    except OSError as error:
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{source} cannot be read: {error.strerror}") from error


class _RetryError(Exception):
    """The request is worth another try; the text says what happened."""

    def __init__(self, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.wait_s = wait_s


async def _download(
    url: str, file: ModelFile, sink: Sink, headers: Mapping[str, str], written: Callable[[], None]
) -> None:
    idle = 0
    async with httpx.AsyncClient(follow_redirects=True, timeout=TIMEOUT) as client:
        while True:
            before = sink.size
            try:
                await _request(client, url, file, sink, headers, written)
            except (httpx.TransportError, _RetryError) as error:
                idle = 0 if sink.size > before else idle + 1
                if idle == TRIES:
                    raise StepError(
                        Reason.HUB_UNREACHABLE,
                        f"{_host(url)} gave {sink.size} of {file.size} bytes of {file.path}, then: "
                        f"{error or type(error).__name__}",
                    ) from error
                asked = error.wait_s if isinstance(error, _RetryError) else 0.0
                await asyncio.sleep(min(MAX_WAIT_S, max(asked, FIRST_WAIT_S * 2.0 ** max(0, idle - 1))))
            except httpx.HTTPError as error:
                raise StepError(Reason.HUB_UNREACHABLE, f"{_host(url)}, asked for {file.path}: {error}") from error
            else:
                return


async def _request(
    client: httpx.AsyncClient,
    url: str,
    file: ModelFile,
    sink: Sink,
    headers: Mapping[str, str],
    written: Callable[[], None],
) -> None:
    # Compressed bytes would have another length and hash than the file.
    sent = {**headers, "Accept-Encoding": "identity"}
    if sink.size:
        sent["Range"] = f"bytes={sink.size}-"
    async with client.stream("GET", url, headers=sent) as response:
        _judge_status(response, url, file)
        if response.status_code == 200 and sink.size:
            sink.restart()
        _judge_size(response, url, file, sink)
        await _drain(response, url, file, sink, written)
    if sink.size < file.size:
        raise _RetryError("the connection ended early")


async def _drain(response: httpx.Response, url: str, file: ModelFile, sink: Sink, written: Callable[[], None]) -> None:
    """Write the body in steps large enough for a thread; what came before a cut is kept too."""
    buffer = bytearray()

    async def flush() -> None:
        await sink.write(bytes(buffer))
        buffer.clear()
        written()

    try:
        async for piece in response.aiter_raw():
            if sink.size + len(buffer) + len(piece) > file.size:
                raise StepError(
                    Reason.WEIGHTS_CORRUPT, f"{_host(url)} gives more than {file.size} bytes for {file.path}"
                )
            buffer += piece
            if len(buffer) >= HTTP_STEP:
                await flush()
    except httpx.TransportError:
        await flush()
        raise
    await flush()


def _judge_status(response: httpx.Response, url: str, file: ModelFile) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in (401, 403):
        raise StepError(Reason.REPO_FORBIDDEN, f"{_host(url)} answers {status} for {file.path}")
    if status in (404, 410):
        raise StepError(Reason.WEIGHTS_MISSING, f"{_host(url)} has no {file.path} (status {status})")
    if status in (408, 429) or status >= 500:
        raise _RetryError(f"status {status}", _retry_after(response))
    raise StepError(Reason.HUB_UNREACHABLE, f"{_host(url)} answers {status} for {file.path}")


def _judge_size(response: httpx.Response, url: str, file: ModelFile, sink: Sink) -> None:
    """Another size than listed is another file: say so before its bytes are fetched."""
    if response.status_code == 206:
        span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if span.partition("-")[0] != str(sink.size):
            raise _RetryError(f"the answer starts at {span or 'an unnamed place'}, not at {sink.size}")
    else:
        total = response.headers.get("Content-Length", "")
    if total.isdigit() and int(total) != file.size:
        raise StepError(
            Reason.WEIGHTS_CORRUPT, f"{_host(url)} has {total} bytes for {file.path}, {file.size} are expected"
        )


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def _host(url: str) -> str:
    """Where, without path and query: a signed URL is a secret."""
    return urlsplit(url).netloc.rpartition("@")[2]

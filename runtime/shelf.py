"""A model's files in an object store: each verified while it is uploaded, the manifest last of all."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore

from fleet.reasons import Reason, StepError
from fleet.repos import INDEX, check_paths
from fleet.safetensors import MAX_INDEX, check_index
from fleet.spec import ModelFile
from runtime import manifest
from runtime.hashes import Hashes, Hashing
from runtime.manifest import MANIFEST
from runtime.objects import open_store, told
from runtime.sources import Ranged, SourceKind
from runtime.stream import Buffers, stream
from runtime.transfer import Fetched

PROOFS = ".llmgw-proofs"
"""One small object for each file that is uploaded and verified, so that the next attempt need not do it again."""
PART = 8 * 1024**2
"""Bytes of one part: S3 takes 10,000 of them, so files of up to 78 GiB; larger ones have larger parts."""
MOST_PARTS = 9000
PARTS_AT_ONCE = 4
TRIES = 2
"""A file whose hash is wrong is fetched once more."""


async def fill(
    files: Sequence[ModelFile], sources: Sequence[Ranged], url: str, *, progress: Callable[[int, int], None]
) -> Fetched:
    """Have exactly these files beneath `url`, each verified; what is there and right is not uploaded again.

    Each file comes from the first of the `sources` that gives it. An object appears when its hash has been found
    right, and the manifest when all have appeared. Raises StepError as the last source does; WEIGHTS_CORRUPT,
    WEIGHTS_MISSING (the index names another shard), MIRROR_UNREACHABLE.
    """
    started = time.monotonic()
    check_paths([*(file.path for file in files), MANIFEST, PROOFS])
    upload = _Upload(open_store(url), url, sources, progress, sum(file.size for file in files))
    known = await upload.proven(files)
    if known is not None:
        return Fetched(known, 0, time.monotonic() - started, {})
    # The index first: a model that lacks a shard is refused before the others are uploaded.
    ordered = sorted(files, key=lambda file: file.path != INDEX)
    brought: dict[str, ModelFile] = {}
    for file in ordered:
        brought[file.path] = await upload.bring(file)
        if file.path == INDEX:
            check_index(await upload.text(INDEX), {one.path for one in files})
    found = tuple(brought[file.path] for file in files)
    await upload.finish(found)
    return Fetched(found, upload.copied, time.monotonic() - started, upload.given)


async def look(files: Sequence[ModelFile], url: str) -> Fetched:
    """What a mirror that is only read holds. Raises StepError: WEIGHTS_MISSING where it lacks these files.

    Its word on BLAKE3 is not taken: who filled it is not known, and nodes would not hold its bytes against the SHA-256
    of the hub any more.
    """
    started = time.monotonic()
    known = await _Upload(open_store(url), url, (), lambda done, total: None, 0).proven(files)
    if known is None:
        raise StepError(
            Reason.WEIGHTS_MISSING,
            f"{url} does not hold these files with their {MANIFEST}; a mirror behind http: is only read: fill its "
            "directory with a worker that has it as `mirror.path`",
        )
    unsaid = tuple(file.model_copy(update={"blake3": ""}) for file in known)
    return Fetched(unsaid, 0, time.monotonic() - started, {})


async def clear(url: str) -> None:
    """Remove a model: its manifest first, so that nobody takes the rest for whole."""
    store = open_store(url)
    with told(url):
        paths = [entry["path"] for page in await obstore.list(store).collect_async() for entry in [page]]
        for path in sorted(paths, key=lambda path: path != MANIFEST):
            try:
                await obstore.delete_async(store, path)
            except FileNotFoundError:
                continue


@dataclass
class _Upload:
    store: ObjectStore
    url: str
    sources: Sequence[Ranged]
    progress: Callable[[int, int], None]
    total: int
    copied: int = 0
    given: dict[SourceKind, int] = field(default_factory=dict)
    """What of it each kind of source gave."""
    _done: int = 0
    _buffers: Buffers = field(default_factory=Buffers)

    async def proven(self, files: Sequence[ModelFile]) -> tuple[ModelFile, ...] | None:
        """The files with their hashes, where the manifest names each and each object has its length."""
        recorded = manifest.parse(await self._maybe(MANIFEST))
        found = []
        for file in files:
            known = recorded.get(file.path)
            if known is None or not manifest.agrees(known, file) or await self._size(file.path) != file.size:
                return None
            found.append(file.model_copy(update={"sha256": known.sha256, "blake3": known.blake3}))
        return tuple(found)

    async def bring(self, file: ModelFile) -> ModelFile:
        """Have one object there."""
        proof = f"{PROOFS}/{hashlib.sha256(file.path.encode()).hexdigest()[:32]}.json"
        known = manifest.parse(await self._maybe(proof)).get(file.path)
        if known is None or not manifest.agrees(known, file) or await self._size(file.path) != file.size:
            known = (await self._verified(file)).noted(file)
            with told(f"{self.url}/{proof}"):
                await obstore.put_async(self.store, proof, manifest.dump([known]).encode())
        self._done += file.size
        self.progress(self._done, self.total)
        return file.model_copy(update={"sha256": known.sha256, "blake3": known.blake3})

    async def finish(self, files: Sequence[ModelFile]) -> None:
        """The manifest, and the proofs are not needed any more. Two workers may end at once: both wrote the same."""
        data = manifest.dump(files).encode()
        with told(f"{self.url}/{MANIFEST}"):
            try:
                await obstore.put_async(self.store, MANIFEST, data, mode="create")
            except AlreadyExistsError:
                await obstore.put_async(self.store, MANIFEST, data)
            for entry in await obstore.list(self.store, prefix=PROOFS).collect_async():
                await obstore.delete_async(self.store, entry["path"])

    async def text(self, path: str) -> bytes:
        """A small object."""
        with told(f"{self.url}/{path}"):
            return bytes(await obstore.get_range_async(self.store, path, start=0, end=MAX_INDEX + 1))

    async def _verified(self, file: ModelFile) -> Hashes:
        error = StepError(Reason.WEIGHTS_MISSING, f"{file.path}: there is nobody to ask for it")
        for source in self.sources:
            try:
                return await self._from(source, file)
            except StepError as caught:
                error = caught
        raise error

    async def _from(self, source: Ranged, file: ModelFile) -> Hashes:
        for attempt in range(TRIES):
            body = _Body(file, self, source)
            found = await self._put(file, body)
            if found is not None:
                return found
            if attempt == TRIES - 1:
                raise StepError(Reason.WEIGHTS_CORRUPT, f"{body.wrong} (fetched twice)")
        raise StepError(Reason.INTERNAL, f"{file.path} was never asked for")

    async def _put(self, file: ModelFile, body: "_Body") -> Hashes | None:
        """Upload; None where the hash is wrong. A body that fails aborts the upload, and no object appears."""
        if file.size <= PART:
            data = bytearray()
            async with aclosing(body.pieces()) as pieces:
                async for piece in pieces:
                    data += piece
            if body.wrong:
                return None
            with told(f"{self.url}/{file.path}"):
                await obstore.put_async(self.store, file.path, bytes(data))
            return body.found
        part = max(PART, -(-file.size // MOST_PARTS))
        sending = asyncio.ensure_future(
            obstore.put_async(self.store, file.path, body.checked(), chunk_size=part, max_concurrency=PARTS_AT_ONCE)
        )
        try:
            with told(f"{self.url}/{file.path}"):
                await asyncio.shield(sending)
        except asyncio.CancelledError:
            body.stop.set()
            await asyncio.wait([sending])
            raise
        except StepError as error:
            if body.wrong:
                return None
            if body.error is not None:
                raise body.error from error
            raise
        return body.found

    async def _maybe(self, path: str) -> bytes:
        try:
            return await self.text(path)
        except StepError as error:
            if error.failure.reason is not Reason.WEIGHTS_MISSING:
                raise
            return b""

    async def _size(self, path: str) -> int:
        try:
            with told(f"{self.url}/{path}"):
                return (await obstore.head_async(self.store, path))["size"]
        except StepError as error:
            if error.failure.reason is not Reason.WEIGHTS_MISSING:
                raise
            return -1


class _Body:
    """A file's bytes on their way through."""

    def __init__(self, file: ModelFile, upload: _Upload, source: Ranged) -> None:
        self.wrong = ""
        """What of the hashes differs, in words; known at the end."""
        self.error: StepError | None = None
        self.stop = asyncio.Event()
        self.found = Hashes("", "")
        self._file = file
        self._upload = upload
        self._source = source

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The bytes; at their end `found` and `wrong` are known."""
        upload, kind = self._upload, self._source.kind
        hashing, sent = Hashing(self._file), 0
        async with aclosing(stream(self._source, self._file, 0, upload._buffers)) as views:
            async for view in views:
                piece = bytes(view)  # the store keeps it until its part is sent, and the view changes before that
                await hashing.update(memoryview(piece))
                sent += len(piece)
                upload.copied += len(piece)
                upload.given[kind] = upload.given.get(kind, 0) + len(piece)
                upload.progress(upload._done + sent, upload.total)
                yield piece
        self.found = hashing.found()
        self.wrong = self.found.wrong(self._file)

    async def checked(self) -> AsyncGenerator[bytes, None]:
        """The bytes, and an error in the place of their end where they are wrong, or nobody wants them any more."""
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            async with aclosing(self.pieces()) as pieces:
                while True:
                    following = asyncio.ensure_future(anext(pieces, b""))
                    await asyncio.wait([following, stopped], return_when=asyncio.FIRST_COMPLETED)
                    if not following.done():
                        following.cancel()
                        await asyncio.wait([following])
                        raise ValueError("the upload was cancelled")
                    piece = following.result()
                    if not piece:
                        break
                    yield piece
        except StepError as error:
            self.error = error
            raise
        finally:
            stopped.cancel()
        if self.wrong:
            raise ValueError("the hash is wrong")

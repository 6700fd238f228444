"""The job's first step: a repo as a person named it, resolved to a revision and the list of its files."""

import hashlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from temporalio import activity

from activities.contract import RESOLVE_MODEL, ResolveRequest
from activities.elsewhere import Elsewhere
from activities.hub import HUB_TIMEOUT_S, MAX_FILES, look_up, status_refusal
from fleet.architectures import FORMATS, engine_for
from fleet.engine_args import check_wish
from fleet.reasons import Reason, StepError
from fleet.repos import RepoRef, check_path, check_paths, choose_files, file_url, parse_repo, shards_beside
from fleet.spec import ModelFile, ResolvedModel
from runtime.config import HubConfig
from runtime.objects import listed
from runtime.threads import in_thread

AWAY = frozenset({Reason.HUB_UNREACHABLE, Reason.HUB_BUSY})
"""Why the hub may not have answered, although it knows the repo."""


AWAY_AFTER = 2
"""Attempts that end so: a single answer of 500 must not bring yesterday's commit. Each may take 20 s of silence."""


class Registry:
    """Looks models up: on a hub, in this machine's files, or at a URL."""

    def __init__(self, hub: HubConfig, elsewhere: Elsewhere | None = None) -> None:
        """`elsewhere` is asked when the hub is away; without it that is a failure."""
        self._hub = hub
        self._elsewhere = elsewhere

    @activity.defn(name=RESOLVE_MODEL)
    async def resolve_model(self, request: ResolveRequest) -> ResolvedModel:
        """Raises StepError: BAD_INPUT, REPO_NOT_FOUND, REVISION_NOT_FOUND, REPO_FORBIDDEN, TOKEN_UNKNOWN, NO_WEIGHTS,
        WEIGHTS_UNREADABLE, HUB_BUSY, HUB_UNREACHABLE; and BAD_FLAG for arguments that no node would take."""
        if request.engine is not None:
            check_wish(request.engine, request.args, trust_remote_code=request.trust_remote_code)
        resolved = await self._resolve(parse_repo(request.repo), request)
        if request.engine is None:
            engine = engine_for(resolved.format)
            check_wish(engine, request.args, trust_remote_code=request.trust_remote_code)
        return resolved

    async def _resolve(self, ref: RepoRef, request: ResolveRequest) -> ResolvedModel:
        if ref.scheme == "file":
            return await in_thread(_resolve_path, ref, request)
        if ref.scheme == "https":
            return await _resolve_url(ref, request)
        if ref.scheme == "store":
            return await _resolve_store(ref, request)
        return await self._resolve_hub(ref, request)

    async def _resolve_hub(self, ref: RepoRef, request: ResolveRequest) -> ResolvedModel:
        asked = f"{self._hub.endpoint} {ref.repo}@{ref.revision}:{ref.variant}"
        asked += f" {request.engine or 'any engine'}{' with code' if request.trust_remote_code else ''}"
        try:
            commit, files = await in_thread(look_up, self._hub, ref, request.token)
        except StepError as error:
            passing = not error.failure.retry_after_s and activity.info().attempt < AWAY_AFTER
            if self._elsewhere is None or error.failure.reason not in AWAY or passing:
                raise
            return await self._elsewhere.find(asked, ref, request, error)
        resolved = _resolved(ref, commit, files, request)
        if self._elsewhere is not None:
            await self._elsewhere.kept.keep(asked, resolved, time.time())
        return resolved


def _resolved(ref: RepoRef, revision: str, files: list[ModelFile], request: ResolveRequest) -> ResolvedModel:
    wanted = FORMATS[request.engine] if request.engine is not None else None
    try:
        choice = choose_files(files, ref.variant, wanted, code=request.trust_remote_code)
    except StepError as error:
        raise StepError(error.failure.reason, f"{ref.repo}: {error.failure.detail}") from error
    check_paths(file.path for file in choice.files)
    for file in choice.files:
        if file.size < 0:
            raise StepError(Reason.NO_WEIGHTS, f"{ref.repo} does not say how large {file.path} is")
    return ResolvedModel(repo=ref.repo, revision=revision, format=choice.format, entry=choice.entry, files=choice.files)


# -- this machine's files ---------------------------------------------------------------------------------------------


def _resolve_path(ref: RepoRef, request: ResolveRequest) -> ResolvedModel:
    path = Path(ref.location)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            base, names = path, _regular_files(path)
        elif stat.S_ISREG(status.st_mode):
            base, names = path.parent, shards_beside(path.name, (entry.name for entry in path.parent.iterdir()))
        else:
            raise StepError(Reason.BAD_INPUT, f"{path} is neither a file nor a directory")
        # Without hashes, size and time of change stand for the content; the mirror hashes what it copies.
        found = {name: (base / name).stat() for name in names}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StepError(Reason.REPO_NOT_FOUND, f"{error.filename or path} does not exist on the worker") from error
    except OSError as error:
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{error.filename or path}: {error.strerror}") from error
    files = [ModelFile(path=name, size=each.st_size, url=(base / name).as_uri()) for name, each in found.items()]
    resolved = _resolved(ref, "", files, request)
    for file in resolved.files:
        _check_readable(base / file.path)
    marks = (f"{file.path}\0{file.size}\0{found[file.path].st_mtime_ns}" for file in resolved.files)
    return resolved.model_copy(update={"revision": _digest([ref.location, *marks])})


def _regular_files(root: Path) -> list[str]:
    """Paths relative to `root`; a link to a regular file counts (a hub's cache is made of them), one to a directory
    is not followed."""
    names: list[str] = []
    seen = 0
    for directory, _, entries in os.walk(root, onerror=_raise):
        for entry in sorted(entries):
            seen += 1
            path = Path(directory) / entry
            if path.is_file():
                names.append(path.relative_to(root).as_posix())
        if seen > MAX_FILES:
            raise StepError(
                Reason.BAD_INPUT, f"{root} holds more than {MAX_FILES} files: name the model's own directory"
            )
    return names


def _raise(error: OSError) -> None:
    raise error


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise StepError(Reason.WEIGHTS_UNREADABLE, f"{path} cannot be read: {error.strerror}") from error


# -- a URL ------------------------------------------------------------------------------------------------------------


async def _resolve_url(ref: RepoRef, request: ResolveRequest) -> ResolvedModel:
    parts = urlsplit(ref.location)
    name = unquote(parts.path.rpartition("/")[2])
    check_path(name)
    try:
        async with httpx.AsyncClient(follow_redirects=True, timeout=HUB_TIMEOUT_S) as client:
            # What is not asked for with `identity` may be answered with the length of its compressed form.
            response = await client.head(ref.location, headers={"Accept-Encoding": "identity"})
    except httpx.HTTPError as error:
        raise StepError(
            Reason.HUB_UNREACHABLE, f"{parts.netloc} does not answer: {error or type(error).__name__}"
        ) from error
    if response.status_code != 200:
        raise status_refusal(parts.path, parts.netloc, "", response.status_code, response.headers)
    length = response.headers.get("Content-Length", "")
    if not length.isdigit():
        raise StepError(Reason.NO_WEIGHTS, f"{parts.netloc} does not say how large {name} is")
    validators: list[Any] = [response.headers.get(key, "") for key in ("ETag", "Last-Modified")]
    files = [ModelFile(path=name, size=int(length), url=ref.location)]
    return _resolved(ref, _digest([ref.location, length, *validators]), files, request)


# -- an object store --------------------------------------------------------------------------------------------------


async def _resolve_store(ref: RepoRef, request: ResolveRequest) -> ResolvedModel:
    """A directory, or a GGUF with its shards. Its own tags stand for the content; the mirror hashes what it copies."""
    single = ref.location.lower().endswith(".gguf")
    base, _, name = ref.location.rpartition("/") if single else (ref.location, "", "")
    try:
        stored = {one.path: one for one in await listed(base, MAX_FILES)}
    except StepError as error:
        where = "address and credentials of a store are those in the worker's environment, such as AWS_ENDPOINT_URL"
        raise StepError(Reason.HUB_UNREACHABLE, f"{error.failure.detail} ({where})") from error
    if single:
        stored = {path: stored[path] for path in shards_beside(name, stored) if path in stored}
    if not stored:
        raise StepError(Reason.REPO_NOT_FOUND, f"{ref.location}: nothing is there, or the worker may not list it")
    files = [ModelFile(path=one.path, size=one.size, url=file_url(base, one.path)) for one in stored.values()]
    resolved = _resolved(ref, "", files, request)
    marks = (f"{file.path}\0{file.size}\0{stored[file.path].mark}" for file in resolved.files)
    return resolved.model_copy(update={"revision": _digest([ref.location, *marks])})


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:12]

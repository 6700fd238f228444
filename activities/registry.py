"""The job's first step: a repo as a person named it, resolved to a revision and the list of its files."""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import httpx2
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from temporalio import activity

from activities.contract import RESOLVE_MODEL, ResolveRequest
from fleet.architectures import engine_for
from fleet.engine_args import check_wish
from fleet.reasons import Reason, StepError
from fleet.repos import RepoRef, check_path, check_paths, choose_files, parse_repo, shards_beside
from fleet.spec import ModelFile, ResolvedModel
from runtime.config import HubConfig
from runtime.download import in_thread

HUB_TIMEOUT_S = 20.0
"""Of one request for a repo's file list: the hub answers in one, a repo with thousands of files in five."""
MAX_FILES = 20_000
"""Files looked at in a directory or a repo: more is not a model but somebody's home."""


class Registry:
    """Looks models up: on a hub, in this machine's files, or at a URL."""

    def __init__(self, hub: HubConfig) -> None:
        self._hub = hub

    @activity.defn(name=RESOLVE_MODEL)
    async def resolve_model(self, request: ResolveRequest) -> ResolvedModel:
        """Raises StepError: BAD_INPUT, REPO_NOT_FOUND, REPO_FORBIDDEN, NO_WEIGHTS, WEIGHTS_UNREADABLE,
        HUB_UNREACHABLE; and BAD_FLAG for arguments that no node would take."""
        if request.engine is not None:
            check_wish(request.engine, request.args, trust_remote_code=request.trust_remote_code)
        resolved = await self._resolve(parse_repo(request.repo), code=request.trust_remote_code)
        if request.engine is None:
            engine = engine_for(resolved.format)
            check_wish(engine, request.args, trust_remote_code=request.trust_remote_code)
        return resolved

    async def _resolve(self, ref: RepoRef, *, code: bool) -> ResolvedModel:
        if ref.scheme == "file":
            return await in_thread(_resolve_path, ref, code=code)
        if ref.scheme == "https":
            return await _resolve_url(ref)  # one file, which has no code beside it
        return await in_thread(self._resolve_hub, ref, code=code)

    def _resolve_hub(self, ref: RepoRef, *, code: bool) -> ResolvedModel:
        where = f"{ref.location}@{ref.revision}" if ref.revision else ref.location
        endpoint = self._hub.endpoint.rstrip("/")
        # False, not None: a token of whoever runs the worker is not sent to a hub that the config does not give it to.
        api = HfApi(endpoint=endpoint, token=read_token(self._hub) or False, library_name="llmgw")
        try:
            info = api.model_info(
                ref.location, revision=ref.revision or None, files_metadata=True, timeout=HUB_TIMEOUT_S
            )
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
            raise _hub_error(where, endpoint, error) from error
        commit = info.sha or ""
        if not commit:
            raise StepError(Reason.HUB_UNREACHABLE, f"{endpoint} names no commit for {where}")
        files = [
            ModelFile(
                path=sibling.rfilename,
                size=sibling.size if sibling.size is not None else -1,
                sha256=(sibling.lfs.sha256 if sibling.lfs else "") or "",
                url=hf_hub_url(ref.location, sibling.rfilename, revision=commit, endpoint=endpoint),
            )
            for sibling in (info.siblings or ())[:MAX_FILES]
        ]
        return _resolved(ref, commit, files, code=code)


def read_token(hub: HubConfig) -> str:
    """The hub's access token; empty where none is configured. Raises StepError(REPO_FORBIDDEN)."""
    if hub.token_file is None:
        return ""
    try:
        return hub.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StepError(Reason.REPO_FORBIDDEN, f"the token file {hub.token_file} cannot be read") from error


def _resolved(ref: RepoRef, revision: str, files: list[ModelFile], *, code: bool = False) -> ResolvedModel:
    try:
        choice = choose_files(files, ref.variant, code=code)
    except StepError as error:
        raise StepError(error.failure.reason, f"{ref.repo}: {error.failure.detail}") from error
    check_paths(file.path for file in choice.files)
    for file in choice.files:
        if file.size < 0:
            raise StepError(Reason.NO_WEIGHTS, f"{ref.repo} does not say how large {file.path} is")
    return ResolvedModel(repo=ref.repo, revision=revision, format=choice.format, entry=choice.entry, files=choice.files)


def _hub_error(where: str, endpoint: str, error: Exception) -> StepError:
    """The hub's answer as a reason. Its text is left out: it may quote the request with its headers."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    match error:
        case GatedRepoError() | DisabledRepoError():
            return StepError(Reason.REPO_FORBIDDEN, f"{where} is gated or disabled on {endpoint}")
        case RevisionNotFoundError():
            return StepError(Reason.REPO_NOT_FOUND, f"{where}: the repo has no such revision on {endpoint}")
        case RepositoryNotFoundError():
            return StepError(Reason.REPO_NOT_FOUND, f"{where} is not on {endpoint}, or is private")
        case HFValidationError():
            return StepError(Reason.BAD_INPUT, f"{where} is not the name of a repo")
        case OfflineModeIsEnabled():
            return StepError(Reason.HUB_UNREACHABLE, "HF_HUB_OFFLINE is set for the worker, so no hub is asked")
    if status in (401, 403):
        return StepError(Reason.REPO_FORBIDDEN, f"{endpoint} answers {status} for {where}")
    if status == 404:
        return StepError(Reason.REPO_NOT_FOUND, f"{where} is not on {endpoint}")
    if status == 429 and isinstance(error, HfHubHTTPError):
        wait = error.response.headers.get("Retry-After", "")
        return StepError(
            Reason.HUB_UNREACHABLE,
            f"{endpoint} answers 429 for {where}: too many requests"
            + (f", it asks to wait {wait} s" if wait.isdigit() else ""),
        )
    if status:
        return StepError(Reason.HUB_UNREACHABLE, f"{endpoint} answers {status} for {where}")
    return StepError(Reason.HUB_UNREACHABLE, f"{endpoint} does not answer for {where} ({type(error).__name__})")


# -- this machine's files ---------------------------------------------------------------------------------------------


def _resolve_path(ref: RepoRef, *, code: bool) -> ResolvedModel:
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
    resolved = _resolved(ref, "", files, code=code)
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


async def _resolve_url(ref: RepoRef) -> ResolvedModel:
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
    if response.status_code in (401, 403):
        raise StepError(Reason.REPO_FORBIDDEN, f"{parts.netloc} answers {response.status_code} for {name}")
    if response.status_code in (404, 410):
        raise StepError(Reason.REPO_NOT_FOUND, f"{parts.netloc} has no {parts.path} (status {response.status_code})")
    if response.status_code != 200:
        raise StepError(Reason.HUB_UNREACHABLE, f"{parts.netloc} answers {response.status_code} for {name}")
    length = response.headers.get("Content-Length", "")
    if not length.isdigit():
        raise StepError(Reason.NO_WEIGHTS, f"{parts.netloc} does not say how large {name} is")
    validators: list[Any] = [response.headers.get(key, "") for key in ("ETag", "Last-Modified")]
    files = [ModelFile(path=name, size=int(length), url=ref.location)]
    return _resolved(ref, _digest([ref.location, length, *validators]), files)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:12]

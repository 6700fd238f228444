"""A hub that speaks Hugging Face's API: a repo's commit and files by the hub's own client, and its refusals as reasons.

Nothing of a repo is ever run here: what is read of it is a list of names, sizes and hashes.
"""

from collections.abc import Mapping
from email.utils import parsedate_to_datetime

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

from fleet.inputs import SECRET
from fleet.reasons import Reason, StepError
from fleet.repos import RepoRef
from fleet.spec import ModelFile
from runtime.config import HubConfig

HUB_TIMEOUT_S = 20.0
"""Of one request for a repo's file list: the hub answers in one, a repo with thousands of files in five."""
MAX_FILES = 20_000
"""Files looked at in a directory or a repo: more is not a model but somebody's home."""


def look_up(hub: HubConfig, ref: RepoRef, token: str) -> tuple[str, list[ModelFile]]:
    """The commit that the reference stands for just now, and the files of it. `token`: its name, or "".

    Raises StepError: BAD_INPUT, REPO_NOT_FOUND, REVISION_NOT_FOUND, REPO_FORBIDDEN, TOKEN_UNKNOWN, HUB_BUSY,
    HUB_UNREACHABLE.
    """
    where = f"{ref.location}@{ref.revision}" if ref.revision else ref.location
    endpoint = hub.endpoint.rstrip("/")
    secret = read_token(hub, token)
    # False, not None: a token of whoever runs the worker is not sent to a hub that the config does not give it to.
    api = HfApi(endpoint=endpoint, token=secret or False, library_name="llmgw")
    try:
        info = api.model_info(ref.location, revision=ref.revision or None, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise _refusal(where, endpoint, _who(token, secret), error) from error
    commit = info.sha or ""
    if not commit:
        raise StepError(Reason.HUB_UNREACHABLE, f"{endpoint} names no commit for {where}")
    return commit, [
        ModelFile(
            path=sibling.rfilename,
            size=sibling.size if sibling.size is not None else -1,
            sha256=(sibling.lfs.sha256 if sibling.lfs else "") or "",
            url=hf_hub_url(ref.location, sibling.rfilename, revision=commit, endpoint=endpoint),
        )
        for sibling in (info.siblings or ())[:MAX_FILES]
    ]


def read_token(hub: HubConfig, name: str = "") -> str:
    """The hub's access token of this name; empty where none is configured. Raises StepError."""
    if name and name not in hub.tokens:
        known = ", ".join(sorted(hub.tokens)) or "none"
        told = "of that name, which looks like a token itself" if SECRET.fullmatch(name) else name
        raise StepError(Reason.TOKEN_UNKNOWN, f"token: server.yaml has no token {told}; there are: {known}")
    path = hub.tokens[name] if name else hub.token_file
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StepError(Reason.TOKEN_UNKNOWN, f"the token file {path} cannot be read by the worker") from error


def wait_of(headers: Mapping[str, str]) -> float:
    """How long a server that had enough asks to wait, in seconds; 0 where it does not say."""
    text = headers.get("Retry-After", "").strip()
    if text.isdigit():
        return float(text)
    if not text or not headers.get("Date"):
        return 0.0
    try:
        # By the server's own clock: this machine's may be wrong by more than the wait.
        return max(0.0, (parsedate_to_datetime(text) - parsedate_to_datetime(headers["Date"])).total_seconds())
    except ValueError:
        return 0.0


def _who(name: str, secret: str) -> str:
    if name:
        return f"token {name}"
    return "the token of hub.token_file" if secret else ""


def _refusal(where: str, endpoint: str, who: str, error: Exception) -> StepError:
    """The hub's answer as a reason. Its text is left out: it may quote the request with its headers."""
    match error:
        case GatedRepoError():
            missing = f"{who} has not been granted access to it" if who else "no token was sent"
            return StepError(Reason.REPO_FORBIDDEN, f"{where} is gated on {endpoint}, and {missing}")
        case DisabledRepoError():
            return StepError(Reason.REPO_FORBIDDEN, f"{where} is disabled on {endpoint}")
        case RevisionNotFoundError():
            return StepError(Reason.REVISION_NOT_FOUND, f"{where}: the repo has no such revision on {endpoint}")
        case RepositoryNotFoundError():
            seen = f"{who} may not see it" if who else "is private, and no token was sent"
            return StepError(Reason.REPO_NOT_FOUND, f"{where} is not on {endpoint}, or {seen}")
        case HFValidationError():
            return StepError(Reason.BAD_INPUT, f"{where} is not the name of a repo")
        case OfflineModeIsEnabled():
            return StepError(Reason.HUB_UNREACHABLE, "HF_HUB_OFFLINE is set for the worker, so no hub is asked")
        case HfHubHTTPError():
            return status_refusal(where, endpoint, who, error.response.status_code, error.response.headers)
    return StepError(Reason.HUB_UNREACHABLE, f"{endpoint} does not answer for {where} ({type(error).__name__})")


def status_refusal(where: str, server: str, who: str, status: int, headers: Mapping[str, str]) -> StepError:
    """A status that has no finer meaning, as a reason. `who`: whose token was sent; "" for nobody's."""
    if status == 401:
        wrong = f"{who} is wrong or has expired" if who else "no token was sent"
        return StepError(Reason.REPO_FORBIDDEN, f"{server} answers 401 for {where}: {wrong}")
    if status == 403:
        wrong = f"{who} lacks the grant to read it" if who else "no token was sent"
        return StepError(Reason.REPO_FORBIDDEN, f"{server} answers 403 for {where}: {wrong}")
    if status in (404, 410):
        return StepError(Reason.REPO_NOT_FOUND, f"{where} is not on {server} (status {status})")
    if status == 429:
        wait_s = wait_of(headers)
        asked = f", it asks to wait {wait_s:.0f} s" if wait_s else ""
        return StepError(
            Reason.HUB_BUSY, f"{server} answers 429 for {where}: too many requests{asked}", retry_after_s=wait_s
        )
    return StepError(Reason.HUB_UNREACHABLE, f"{server} answers {status} for {where}")

"""A node's weights as a worker reads them: what the files of a model are, and the files in ranges, by their hashes."""

import httpx

from fleet.reasons import Reason, StepError
from fleet.repos import check_paths
from fleet.spec import ModelFile
from runtime import manifest
from runtime.http_source import HttpSource, host_of
from runtime.peer_source import LISTINGS, PATH
from runtime.sources import Ranged

TIMEOUT_S = 5.0
"""A listing is some kilobytes, read from one small file."""


def peer_files(url: str, secret: str) -> Ranged:
    """Files by their SHA-256, from one node; each of them must have it."""
    base, headers = url.rstrip("/"), _opens(secret)
    return HttpSource(
        "peer",
        host_of(base),
        lambda file: f"{base}{PATH}{file.sha256}",
        headers=headers,
        unreachable=Reason.NODE_UNREACHABLE,
    )


async def listing(url: str, secret: str, name: str) -> tuple[ModelFile, ...]:
    """The files of the weights of this id; empty where the node has none such, or does not answer."""
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = await client.get(f"{url.rstrip('/')}{LISTINGS}{name}", headers=_opens(secret))
    except httpx.HTTPError:
        return ()
    recorded = manifest.parse(answer.content) if answer.status_code == httpx.codes.OK else {}
    try:
        check_paths(recorded)
    except StepError:
        return ()
    # By SHA-256 alone: it is what the node is asked by, and what the copy is verified by.
    return tuple(ModelFile(path=path, size=file.size, sha256=file.sha256) for path, file in recorded.items())


def _opens(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}

"""What an engine says of itself over HTTP: whether it serves, and how many requests it has in flight."""

from enum import StrEnum
from typing import NamedTuple, Self

import httpx

from runtime.engine_keys import EngineAuth, EngineKeys

TIMEOUT_S = 5.0
"""An engine whose cores are full of streams answers late: late is not dead."""

ONCE = httpx.Limits(max_keepalive_connections=0)


class Health(StrEnum):
    """What the health path answered."""

    SERVING = "serving"
    NOT_SERVING = "not serving"  # an answer other than 200: it loads, or its core has died
    REFUSED = "refused"  # nobody listens
    LATE = "late"


class Answer(NamedTuple):
    """One look."""

    health: Health
    detail: str


class Probe:
    """One HTTP client for all engines of the node."""

    def __init__(self, keys: EngineKeys | None = None) -> None:
        # Engines are on this machine: a proxy from the environment must not come between. Each look is a connection of
        # its own: one that is kept may be closed by the engine just when it is used again, which looks like an end.
        auth = EngineAuth(keys) if keys is not None else None
        self._http = httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, auth=auth, limits=ONCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def health(self, endpoint: str, path: str) -> Answer:
        """Ask the health path once."""
        try:
            response = await self._http.get(f"{endpoint}{path}")
        except httpx.TimeoutException:
            return Answer(Health.LATE, f"{path} did not answer within {TIMEOUT_S:.0f} s")
        except httpx.ConnectError as error:
            return Answer(Health.REFUSED, f"{path} cannot be reached: {error or type(error).__name__}")
        except httpx.HTTPError as error:
            return Answer(Health.NOT_SERVING, f"{path} broke off: {error or type(error).__name__}")
        if response.status_code == httpx.codes.OK:
            return Answer(Health.SERVING, "")
        return Answer(Health.NOT_SERVING, f"{path} answers {response.status_code}")

    async def metrics(self, endpoint: str) -> str | None:
        """The text of `/metrics`; empty where it is late, breaks off or is an error, None where nobody listens."""
        try:
            response = await self._http.get(f"{endpoint}/metrics")
        except httpx.ConnectError:
            return None
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == httpx.codes.OK else ""

    async def patient_metrics(self, endpoint: str, timeout_s: float) -> str | None:
        """The text of `/metrics` however late; empty where it answers with an error, None where nothing came."""
        try:
            response = await self._http.get(f"{endpoint}/metrics", timeout=timeout_s)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == httpx.codes.OK else ""

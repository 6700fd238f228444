"""An engine's URL as the attributes of a span."""

from urllib.parse import urlsplit


def server_of(endpoint: str) -> dict[str, str | int]:
    """`server.address` and `server.port` of an engine's URL."""
    parts = urlsplit(endpoint)
    port: dict[str, str | int] = {"server.port": parts.port} if parts.port is not None else {}
    return {"server.address": parts.hostname or endpoint, **port}

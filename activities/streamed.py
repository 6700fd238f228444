"""A streamed completion joined into the answer that would have come in one piece, with the moment of its first text."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import httpx

DATA, DONE = "data:", "[DONE]"


class Joined(NamedTuple):
    """One answer."""

    body: str
    """As it came; of a stream, the JSON of what was joined, or what could not be."""
    first_ns: int
    """When its first text came; nanoseconds since the epoch. For what did not stream, when all was there."""


async def joined(response: httpx.Response) -> Joined:
    """Read the whole answer. Engines that do not stream answer in one piece. Raises what httpx raises."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        await response.aread()
        return Joined(response.text, time.time_ns())
    text, usage, model, first_ns, came = "", None, "", 0, False
    async for line in lines_of(response):
        data = line.removeprefix(DATA).strip()
        if not line.startswith(DATA) or data == DONE:
            continue
        try:
            chunk = json.loads(data)
            said = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return Joined(data, time.time_ns())
        came, text = True, text + said
        usage, model = chunk.get("usage") or usage, chunk.get("model") or model
        first_ns = first_ns or (time.time_ns() if said else 0)
    return Joined(_answer(text, usage, model) if came else "", first_ns)


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """The lines of an event stream, without their ends.

    httpx's own lines also end at U+0085, U+2028 and their like, which stand unescaped where a model says them.
    """
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
    if rest:
        yield rest


def _answer(text: str, usage: Mapping[str, Any] | None, model: object) -> str:
    return json.dumps({"model": model, "choices": [{"message": {"content": text}}], "usage": usage})

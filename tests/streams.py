"""Clients that stream answers from an OpenAI-compatible server, and whether each got all of its own."""

import asyncio
import json
from dataclasses import dataclass

import httpx


@dataclass
class Stream:
    """One request: how many pieces came, and whether the end was said."""

    pieces: int = 0
    whole: bool = False

    async def run(self, endpoint: str, tokens: int, model: str = "tiny") -> None:
        """Ask, and read to the end."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            async with http.stream("POST", f"{endpoint}/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        self.whole = True
                    elif line.startswith("data: ") and json.loads(line[6:]).get("choices"):
                        self.pieces += 1


def begin(endpoint: str, count: int, tokens: int) -> tuple[list[Stream], "asyncio.Future[list[None]]"]:
    """So many at once; the future ends with the last."""
    streams = [Stream() for _ in range(count)]
    return streams, asyncio.gather(*(one.run(endpoint, tokens) for one in streams))

"""The time of a fetch that waited for peers, as spans: the waits, and the copying before, between and after them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from agent.spans import between

WAIT_FOR_PEER = "wait for peer"
"""A peer that fetches the files itself has no more of them yet."""
COPY = "copy weights"

APART_NS = 1_000_000_000
"""Waits that are nearer to each other are one: behind a peer whose file grows, a fetch waits for each of its steps."""
APART_SHARE = 0.02
"""The same of a long fetch, as a share of it: so it has fifty waits at most."""


@contextmanager
def peer_waits() -> Iterator["PeerWaits"]:
    """Around a fetch: its waits become spans beneath the current one when it is over."""
    waits = PeerWaits()
    try:
        yield waits
    finally:
        waits.end()


class PeerWaits:
    """Of one fetch, from now on."""

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._waiting = 0
        self._since_ns = 0
        self._waits: list[tuple[int, int, str]] = []
        """Start, end and the peer."""

    @contextmanager
    def wait(self, peer: str) -> Iterator[None]:
        """While this lasts, a read waits for the peer; several may at once."""
        if not self._waiting:
            self._since_ns = time.time_ns()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                _add(self._waits, (self._since_ns, time.time_ns(), peer), APART_NS)

    def end(self) -> None:
        """Make the spans beneath the current one; none where nothing was waited for: then it is all copying."""
        now = time.time_ns()
        waits: list[tuple[int, int, str]] = []
        for one in self._waits:
            _add(waits, one, int((now - self._began_ns) * APART_SHARE))
        if not waits:
            return
        copied_ns = self._began_ns
        for start, end, peer in waits:
            between(COPY, copied_ns, start, {})
            between(WAIT_FOR_PEER, start, end, {"llmgw.from": peer})
            copied_ns = end
        between(COPY, copied_ns, now, {})


def _add(waits: list[tuple[int, int, str]], one: tuple[int, int, str], apart_ns: int) -> None:
    start, end, peer = one
    if waits and start - waits[-1][1] < apart_ns:
        start, _, peer = waits.pop()
    waits.append((start, end, peer))

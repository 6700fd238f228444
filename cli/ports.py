"""Which ports the embedded system takes: pure choice; who holds a port is asked through a function."""

from collections.abc import Callable
from dataclasses import dataclass

SEARCHED = 200
"""How far above a taken port the next free one is looked for. More than anyone runs side by side."""
LAST_PORT = 65535

Holder = Callable[[int], str]
"""Who listens on a port, such as "temporal (pid 123)"; empty where it is free."""


class PortTakenError(Exception):
    """A port that was asked for explicitly is taken, or none is free; the text names the holder."""


@dataclass(frozen=True)
class PortWish:
    """A port one part of the system needs."""

    part: str
    """Who needs it, in words: "Temporal", "the web UI", "the gateway"."""
    port: int
    explicit: bool = False
    """Somebody set it: another port would be a surprise, so a taken one is an error."""
    setting: str = ""
    """How to set it, such as `--port`."""


@dataclass(frozen=True)
class PortChoice:
    """The ports in the order of the wishes, and what to tell the operator."""

    ports: tuple[int, ...]
    notes: tuple[str, ...]


def choose(wishes: tuple[PortWish, ...], holder: Holder) -> PortChoice:
    """Give every wish a free port, none twice. Raises PortTakenError."""
    # An explicit port is nobody else's, also where a default would come to it first.
    given = {wish.port: wish.part for wish in wishes if wish.explicit}
    ports: list[int] = []
    notes: list[str] = []
    for wish in wishes:
        taken_by = holder(wish.port) or _given_to(wish, given)
        if not taken_by:
            port = wish.port
        elif wish.explicit:
            raise PortTakenError(
                f"port {wish.port} for {wish.part} is taken by {taken_by}: stop it, or name another with {wish.setting}"
            )
        else:
            port = _next_free(wish, holder, given)
            notes.append(f"port {wish.port} is taken by {taken_by}; using {port} for {wish.part} instead")
        given[port] = wish.part
        ports.append(port)
    return PortChoice(tuple(ports), tuple(notes))


def _given_to(wish: PortWish, given: dict[int, str]) -> str:
    owner = given.get(wish.port, "")
    return "" if not owner or owner == wish.part else f"{owner} of this system"


def _next_free(wish: PortWish, holder: Holder, given: dict[int, str]) -> int:
    for port in range(wish.port + 1, min(wish.port + 1 + SEARCHED, LAST_PORT + 1)):
        if port not in given and not holder(port):
            return port
    raise PortTakenError(
        f"no port from {wish.port} to {min(wish.port + SEARCHED, LAST_PORT)} is free for {wish.part}: name one "
        f"with {wish.setting}"
    )

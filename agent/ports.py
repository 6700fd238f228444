"""Which ports of a node's range are free: for an engine to listen on, or for a gang to meet at."""

import logging
import socket
from collections.abc import Collection, Iterable
from typing import NamedTuple

import psutil

from activities.node_contract import PortHolder
from agent.ledger import Entry, Ledger
from agent.processes import command_name
from fleet.reasons import Reason, StepError
from runtime.config import AgentConfig

logger = logging.getLogger(__name__)

ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - who listens there has the port on every address
LAST_PORT = 65535
SEARCHED = 1000
"""How far above a port that another node chose the next free one is looked for: as many as a node's range has."""


class Chosen(NamedTuple):
    """A free port, and those before it in turn that another process holds."""

    port: int
    taken: tuple[int, ...]


def choose_port(config: AgentConfig, ledger: Ledger, avoid: Collection[int] = ()) -> Chosen:
    """The next free port of the range, noted as given out. Raises StepError(PORT_IN_USE) where none is."""
    low, high = config.ports
    taken = list(avoid)
    for port in ledger.next_port(low, high):
        if port in avoid:
            continue
        if port_is_free(config.address, port):
            ledger.note_port(port)
            if taken:
                logger.info("port %d is chosen, for others hold %s", port, ", ".join(map(str, taken)))
            return Chosen(port, tuple(taken))
        taken.append(port)
    raise StepError(Reason.PORT_IN_USE, f"no port of {low} to {high} is free on {config.address}")


def free_from(config: AgentConfig, ledger: Ledger, first: int) -> Chosen:
    """The first port from this one on that is nobody's, also beyond the range. Raises StepError(PORT_IN_USE)."""
    given_out = ledger.given_out()
    taken: list[int] = []
    last = min(first + SEARCHED, LAST_PORT)
    for port in range(first, last + 1):
        if port not in given_out and port_is_free(config.address, port):
            return Chosen(port, tuple(taken))
        taken.append(port)
    raise StepError(Reason.PORT_IN_USE, f"no port of {first} to {last} is free on {config.address}")


def holder_of(address: str, port: int, entries: Iterable[Entry] = ()) -> PortHolder:
    """Who has a port that is taken, as far as it can be seen: a listener, or an engine that is about to listen."""
    pid = next((entry.process.engine.pid for entry in entries if entry.process and entry.port == port), 0)
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr in {(host, port) for host in (address, *ALL_ADDRESSES)}:
            pid = one.pid or pid
    return PortHolder(port=port, pid=pid, name=command_name(pid) if pid else "")


def port_is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closing connections do not count
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True

"""Which ports of a node's range are free: for an engine to listen on, or for a gang to meet at."""

import logging
import socket
from collections.abc import Collection
from typing import NamedTuple

from agent.ledger import Ledger
from fleet.reasons import Reason, StepError
from runtime.config import AgentConfig

logger = logging.getLogger(__name__)


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


def port_is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closing connections do not count
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True

"""Who is connected to an engine of this node: what its own metrics cannot tell before it has read a request."""

import os
from urllib.parse import urlsplit

import psutil

OPEN = frozenset({psutil.CONN_ESTABLISHED, psutil.CONN_SYN_RECV, psutil.CONN_CLOSE_WAIT})
"""A client that has closed its side (CLOSE_WAIT here) may still wait for its answer."""


def clients(endpoint: str) -> int:
    """Connections to the engine at this URL, also those it has not accepted yet, without this process's own."""
    port = urlsplit(endpoint).port
    found = [(one, one.laddr, one.raddr) for one in psutil.net_connections("tcp")]
    ours = {here.port for one, here, there in found if one.pid == os.getpid() and here and there and there.port == port}
    return sum(
        one.status in OPEN and here.port == port and there.port not in ours
        for one, here, there in found
        if here and there
    )

"""Who is connected to an engine of this node: what its own metrics cannot tell before it has read a request."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
DESCRIPTORS = Path("/proc/self/fd")

OPEN = frozenset({"01", "03", "08"})
"""ESTABLISHED, SYN_RECV and CLOSE_WAIT, as Linux numbers them: a client that has closed its side (CLOSE_WAIT here) may
still wait for its answer."""
ORPHAN = "0"
"""The inode of a socket that its process has closed."""


class Row(NamedTuple):
    """A socket, as the kernel lists it."""

    here: int
    """Its port."""
    there: int
    """Its peer's port."""
    state: str
    inode: str


def clients(endpoint: str) -> int:
    """Connections to the engine at this URL, also those it has not accepted yet, without this process's own and
    without those whose client on this machine has gone."""
    port = urlsplit(endpoint).port
    # Two looks: a table is read in pieces, so that one may show a new connection's one end only.
    return len(_strangers(port) & _strangers(port))


def _strangers(port: int | None) -> set[int]:
    """The ports of those who are connected to this one."""
    # Before and after: the probes of this process come and go meanwhile, and were counted in one look of fifteen.
    mine = _own_sockets()
    rows = [row for table in TABLES for row in _rows(table)]
    mine |= _own_sockets()
    known = {row.here for row in rows if row.there == port and (row.inode in mine or row.inode == ORPHAN)}
    return {row.there for row in rows if row.here == port and row.state in OPEN and row.there not in known}


def _own_sockets() -> set[str]:
    found: set[str] = set()
    for descriptor in DESCRIPTORS.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            kind, _, inode = str(descriptor.readlink()).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _rows(table: Path) -> Iterator[Row]:
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except FileNotFoundError:  # a machine without IPv6
        return
    for fields in map(str.split, lines):
        yield Row(_port(fields[1]), _port(fields[2]), fields[3], fields[9])


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)

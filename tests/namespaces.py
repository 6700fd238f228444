"""Network namespaces as machines of their own: each with one address on a bridge, whose own address is this host's.

Needs root and iproute2. `broken` says why they cannot be had here.
"""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

RANGE = "10.213"
"""Of the private ranges; nobody needs it but while a test runs. Each network takes 256 addresses of it."""


@dataclass(frozen=True)
class Namespace:
    """One of them."""

    name: str
    address: str
    link: str
    """This host's end of its cable."""

    @property
    def within(self) -> tuple[str, ...]:
        """What stands before a command that is to run in it."""
        return ("ip", "netns", "exec", self.name)


@dataclass(frozen=True)
class Network:
    """The bridge with what is on it."""

    host: str
    """This host's address."""
    namespaces: tuple[Namespace, ...]


def broken() -> str:
    """Why there are no namespaces here; empty where there are."""
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.decode().strip()}"


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """So many namespaces; all is gone afterwards, what runs in them excepted."""
    mark = uuid.uuid4().hex[:6]
    bridge = f"llmgw{mark}"
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(_addresses())
        made = tuple(
            Namespace(name=f"llmgw-{mark}-{number}", address=f"{net}.{number + 2}", link=f"lg{mark}-{number}")
            for number in range(count)
        )
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("address", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for one in made:
            _ip("netns", "add", one.name)
            stack.callback(_ip, "netns", "del", one.name)
            _ip("link", "add", one.link, "type", "veth", "peer", "name", "eth0", "netns", one.name)
            _ip("link", "set", one.link, "master", bridge, "up")
            for arguments in (
                ("address", "add", f"{one.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-netns", one.name, *arguments)
        yield Network(host=f"{net}.1", namespaces=made)


def pair() -> Iterator[Network]:
    """As a fixture: two of them, or a skip that says why there are none."""
    why = broken()
    if why:
        pytest.skip(why)
    with network(2) as made:
        yield made


@contextlib.contextmanager
def _addresses() -> Iterator[str]:
    """The first three numbers of addresses that no other test of this machine has now."""
    for number in range(256):
        lock = FileLock(Path(tempfile.gettempdir()) / f"llmgw-test-net-{number}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        try:
            yield f"{RANGE}.{number}"
        finally:
            lock.release()
        return
    raise AssertionError("no network is free")


def cut(one: Namespace, *others: Namespace, off: bool = True) -> None:
    """Let these not reach each other, though each still reaches this host; with `off` False they do again."""
    for namespace in (one, *others):
        _ip("link", "set", "dev", namespace.link, "type", "bridge_slave", "isolated", "on" if off else "off")


@contextlib.asynccontextmanager
async def reached_at(host: str, address: str) -> AsyncIterator[str]:
    """What listens at `address` on this host's loopback, for those in the namespaces: its address for them."""
    inner, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(inner, int(port))
        writers.extend((writer, far_writer))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(visit, host, 0)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()


def _ip(*arguments: str) -> None:
    subprocess.run([shutil.which("ip") or "ip", *arguments], check=True, capture_output=True)

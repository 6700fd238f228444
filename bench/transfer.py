"""How fast weights move, with every byte hashed, against `cp` and a plain download; and how much memory that takes.

python -m bench.transfer [--size 1GiB] [--files 1] [--runs 3] [--into DIR] [--memory 10GiB] [--json]
"""

import argparse
import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ByteSize, TypeAdapter

from agent.offers import Offers
from agent.peers import PeerServer
from fleet.spec import ModelFile
from runtime.hashes import Hashing
from runtime.http_source import HttpSource, host_of
from runtime.peer_source import PATH, PeerSource
from runtime.sources import FileSource, Source
from runtime.transfer import fetch

SECRET = "of the bench, on loopback"  # noqa: S105 -- nothing is behind it
GOAL = 0.8
"""Of what `cp`, or a download in one stream, reaches in the same run."""
MEMORY_GOAL = 150 * 1024**2
BLOCK = 1024**2


class Race(NamedTuple):
    """Ours against the plain way, the best of some runs each; bytes a second."""

    name: str
    plain: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours over plain."""
        return self.ours / self.plain


class Fed(NamedTuple):
    """What a child process tells."""

    seconds: float
    peak: int
    """Its largest memory, in bytes; the interpreter and all libraries of an agent are part of it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; `--serve` and `--fetch` are the child processes."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--size", type=_size, default=_size("1GiB"))
    parser.add_argument("--files", type=int, default=1, help="the size is spread over so many")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--into", type=Path, help="a directory on the disk to measure; a temporary one by default")
    parser.add_argument("--memory", type=_size, default=_size("10GiB"), help="moved for the measure of memory; 0: none")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fetch", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.serve:
        _serve(asked.serve)
    elif asked.fetch:
        print(json.dumps(asyncio.run(_fetch(*asked.fetch))._asdict()))
    else:
        with tempfile.TemporaryDirectory(dir=asked.into) as home:
            _measure(Path(home), asked)


def _measure(home: Path, asked: argparse.Namespace) -> None:
    source = home / "source"
    listing = _make(source, asked.size, asked.files)
    unknown = _write(home / "unknown.json", [file.model_copy(update={"blake3": ""}) for file in _listed(listing)])
    races = [
        _local("from a directory, against cp", home, source, listing, asked.runs),
        _local("the same, by SHA-256 (the mirror)", home, source, unknown, asked.runs),
        *_loopback(home, source, listing, asked.runs),
    ]
    shutil.rmtree(source)
    fed = None
    if asked.memory:
        sparse = home / "sparse"
        fed = _child(home, _sparse(sparse, asked.memory), sparse.as_uri())
    if asked.json:
        told = [{**one._asdict(), "ratio": one.ratio} for one in races]
        print(json.dumps({"races": told, "memory": fed and fed.peak}))
        return
    print(f"{asked.size.human_readable()} in {asked.files} file(s), best of {asked.runs}; MB/s")
    print(f"{'':36} {'plain':>7} {'hashed':>7} {'ratio':>6} {'goal':>6}")
    for one in races:
        print(f"{one.name:36} {one.plain / 1e6:7.0f} {one.ours / 1e6:7.0f} {one.ratio:6.2f} {GOAL:6.2f}")
    if fed is not None:
        print(
            f"peak memory of the process, {asked.memory.human_readable()} moved in {fed.seconds:.0f} s: "
            f"{fed.peak / 1024**2:.0f} MiB (goal {MEMORY_GOAL / 1024**2:.0f})"
        )


def _local(name: str, home: Path, source: Path, listing: Path, runs: int) -> Race:
    """From a directory of the same disk, against `cp`; by turns, so that both meet the same machine."""
    size = sum(path.stat().st_size for path in source.iterdir())
    plain, ours = [], []
    for _ in range(runs):
        target = home / "cp"
        began = time.monotonic()
        subprocess.run([shutil.which("cp") or "cp", "-r", str(source), str(target)], check=True)
        plain.append(time.monotonic() - began)
        shutil.rmtree(target)
        ours.append(_child(home, listing, source.as_uri()).seconds)
    return Race(name, size / min(plain), size / min(ours))


def _loopback(home: Path, source: Path, listing: Path, runs: int) -> list[Race]:
    """From another node's door, as a peer and as any web server, against one stream of it into a file, unhashed."""
    files = _listed(listing)
    size = sum(file.size for file in files)
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.transfer", "--serve", str(listing)], stdout=subprocess.PIPE, text=True
    )
    try:
        url = server.stdout.readline().strip() if server.stdout is not None else ""
        plain, peer, web = [], [], []
        for _ in range(runs):
            began = time.monotonic()
            for file in files:
                _download(f"{url}{PATH}{file.sha256}", home / "plain", file.size)
            plain.append(time.monotonic() - began)
            (home / "plain").unlink()
            peer.append(_child(home, listing, url).seconds)
            web.append(_child(home, listing, f"{url}{PATH}").seconds)
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    return [
        Race("from a node, against one stream", size / min(plain), size / min(peer)),
        Race("from a web server, the same", size / min(plain), size / min(web)),
    ]


def _download(url: str, target: Path, size: int) -> None:
    headers = {"Authorization": f"Bearer {SECRET}", "Range": f"bytes=0-{size - 1}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:  # noqa: S310 -- our own URL
        buffer = bytearray(BLOCK)
        with target.open("wb", buffering=0) as stream:
            while got := response.readinto(buffer):
                stream.write(memoryview(buffer)[:got])


def _child(home: Path, listing: Path, url: str) -> Fed:
    """One fetch in a process of its own."""
    target = home / "target" / "m"
    command = [sys.executable, "-m", "bench.transfer", "--fetch", str(listing), url, str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(target.parent)
    return Fed(**json.loads(done.stdout))


def _peak() -> int:
    """The largest resident memory of this process, in bytes. (What `getrusage` tells has the parent's in it.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


async def _fetch(listing: str, url: str, target: str) -> Fed:
    source: Source
    if url.startswith("file:"):
        root = Path(url.removeprefix("file://"))
        source = FileSource("mirror", str(root), lambda file: root / file.path)
    elif url.endswith(PATH):
        headers = {"Authorization": f"Bearer {SECRET}"}
        source = HttpSource("mirror", host_of(url), lambda file: url + file.sha256, headers=headers)
    else:
        source = PeerSource(url, SECRET)
    began = time.monotonic()
    await fetch(_listed(Path(listing)), [source], Path(target), keep_free=0, progress=lambda done, total: None)
    seconds = time.monotonic() - began
    await source.close()
    return Fed(seconds, _peak())


def _serve(listing: Path) -> None:
    offers = Offers(listing.parent)
    for file in _listed(listing):
        offers.grow(file.sha256, listing.parent / "source" / file.path, file.size, file.size)
    server = PeerServer(offers, SECRET)
    server.open("127.0.0.1", 0)
    print(server.url, flush=True)
    while True:
        time.sleep(3600)  # until it is ended


def _make(source: Path, size: int, count: int) -> Path:
    """Files with bytes that do not repeat within a file system's block; they are in the page cache afterwards."""
    source.mkdir(parents=True)
    files = []
    for number in range(count):
        seed, left = hashlib.shake_128(str(number).encode()).digest(BLOCK), size // count
        hashing = Hashing(ModelFile(path="", size=0))
        path = source / f"{number}.bin"
        with path.open("wb") as stream:
            while left:
                block = seed[:left]
                stream.write(block)
                hashing.update_here(memoryview(block))
                left -= len(block)
        files.append(hashing.found().noted(ModelFile(path=path.name, size=path.stat().st_size)))
    return _write(source.parent / "listing.json", files)


def _sparse(source: Path, size: int) -> Path:
    """One file of nothing: it costs no disk to read. Its hashes are not known beforehand, and are made all the same."""
    source.mkdir()
    with (source / "zeros").open("wb") as stream:
        stream.truncate(size)
    return _write(source.parent / "sparse.json", [ModelFile(path="zeros", size=size)])


def _write(path: Path, files: Sequence[ModelFile]) -> Path:
    path.write_text(json.dumps([file.model_dump() for file in files]), encoding="utf-8")
    return path


def _listed(listing: Path) -> list[ModelFile]:
    return [ModelFile.model_validate(each) for each in json.loads(listing.read_text(encoding="utf-8"))]


def _size(text: str) -> ByteSize:
    return TypeAdapter(ByteSize).validate_python(text)


if __name__ == "__main__":
    main()

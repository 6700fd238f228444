"""Control groups: each engine in one of its own where this machine lets us, so that nothing it starts can get away.

Two are made beneath the agent's own: one that holds the processes (version 2, or version 1's freezer or pids), and, in
version 1, one that counts memory. Without the right to make them there is none, and processes are found by their
parents, sessions and environment alone.

No memory limit is set: the weights that an engine maps are page cache and count against it, and what a shard needs is
an estimate, so a limit would kill engines that do no harm. The shim makes engines the first to go instead.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TRACKERS = ("", "freezer", "pids")
"""What can hold an engine's processes, the best first; "" is version 2, which can also end them all at once."""


@dataclass(frozen=True)
class Hierarchy:
    """One tree of control groups, at the place where this process is in it."""

    controllers: frozenset[str]
    """Empty: version 2."""
    own: Path


def hierarchies(mounts: str, own: str) -> tuple[Hierarchy, ...]:
    """From the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`; what is not mounted here is left out."""
    paths: dict[frozenset[str], str] = {}
    nothing: frozenset[str] = frozenset()
    for line in own.splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" or not names.startswith("name="):  # a named one controls nothing
            paths[frozenset(filter(None, names.split(",")))] = path
    found = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = (_unescaped(part) for part in before.split()[3:5])
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        words = frozenset(options.replace(",", " ").split()) if kind == "cgroup" else nothing
        for controllers, path in paths.items():
            mine = not controllers if kind == "cgroup2" else bool(controllers) and controllers <= words
            inside = path == root or path.startswith(root.rstrip("/") + "/")
            if mine and inside and ".." not in Path(path).parts:
                found.append(Hierarchy(controllers, Path(point) / Path(path).relative_to(root)))
    return tuple(found)


class Cgroups:
    """Makes, asks and removes the control groups of this node's engines; the names tell whose they are."""

    def __init__(self, places: tuple[Path, ...], data: Path) -> None:
        """`places` are the groups to make ours in; `data` is the node's directory, which names the node."""
        self._places = places
        self._prefix = f"llmgw-{hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:12]}-"

    @staticmethod
    def here(data: Path) -> "Cgroups":
        """In this process's own groups, as far as they are writable."""
        try:
            known = hierarchies(
                Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"),
                Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace"),
            )
        except OSError:
            return Cgroups((), data)
        usable = [one for one in known if os.access(one.own, os.W_OK) and os.access(one.own / "cgroup.procs", os.W_OK)]
        places = []
        for name in TRACKERS:
            fits = (one.own for one in usable if (name in one.controllers if name else not one.controllers))
            tracker = next(fits, None)
            if tracker is not None:
                places.append(tracker)
                break
        places += [one.own for one in usable if "memory" in one.controllers and one.own not in places]
        return Cgroups(tuple(places), data)

    def make(self, name: str) -> tuple[str, ...]:
        """Groups for one launch, empty where none can be made."""
        made = []
        for place in self._places:
            group = place / (self._prefix + name)
            with contextlib.suppress(OSError):
                group.mkdir(exist_ok=True)
                made.append(str(group))
        return tuple(made)

    def sweep(self) -> None:
        """Remove the empty groups that a crash left; one with processes in it stays."""
        for place in self._places:
            for group in place.glob(f"{self._prefix}*"):
                remove((str(group),))


def inside(groups: Iterable[str]) -> set[int]:
    """Pids of the processes in these groups and in groups they made beneath."""
    found: set[int] = set()
    for group in groups:
        for place in _whole(group):
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in (place / "cgroup.procs").read_text(encoding="ascii").split())
    return found - {0}  # a process of another pid namespace


def kill(groups: Iterable[str]) -> None:
    """End everything in them at once, also what forks faster than anyone could count; version 2 only."""
    for group in groups:
        with contextlib.suppress(OSError):
            (Path(group) / "cgroup.kill").write_bytes(b"1")


def remove(groups: Iterable[str]) -> None:
    """Those that are empty."""
    for group in groups:
        for place in _whole(group):
            with contextlib.suppress(OSError):
                place.rmdir()


def _whole(group: str) -> list[Path]:
    """The group and those made beneath it, the deepest first; none where it is gone."""
    return [Path(place) for place, _, _ in os.walk(group, topdown=False)]


def _unescaped(text: str) -> str:
    r"""Blanks and the like stand as `\040` in mountinfo."""
    return text.encode().decode("unicode_escape") if "\\" in text else text

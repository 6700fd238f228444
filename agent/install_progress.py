"""What uv is doing, read off its output line by line and told in a few words."""

import re

_RESOLVED = re.compile(r"Resolved (\d+) packages? in ")
_BEGUN = re.compile(r"(?:Downloading|Building) (\S+)(?: \((.+)\))?$")
_DONE = re.compile(r"(?:Downloaded|Built) (\S+)$")
_PREPARED = re.compile(r"Prepared \d+ packages? in ")
_INSTALLED = re.compile(r"Installed (\d+) packages? in ")
_COMPILED = re.compile(r"Bytecode compiled (\d+) files? in ")


class InstallProgress:
    """One `uv pip install`. uv names each package that takes a while, as it begins and as it ends."""

    def __init__(self) -> None:
        self._all = 0
        self._begun: dict[str, str] = {}
        """Name → what is shown of it, in the order of their beginnings."""
        self._done: set[str] = set()
        self._words = "resolving"

    @property
    def words(self) -> str:
        """Such as `downloading 151 packages: 2 of 5 large ones done, now torch (178.5MiB)`."""
        return self._words

    def read(self, line: str) -> None:
        """Take in one line; what is not understood changes nothing."""
        text = line.strip()
        if found := _RESOLVED.match(text):
            self._all = int(found[1])
        elif found := _BEGUN.match(text):
            self._begun[found[1]] = f"{found[1]} ({found[2]})" if found[2] else found[1]
        elif found := _DONE.match(text):
            self._done.add(found[1])
        elif _PREPARED.match(text):
            self._words = f"installing {_packages(self._all)}"
            return
        elif found := _INSTALLED.match(text):
            self._words = f"compiling {_packages(int(found[1]))}"
            return
        elif _COMPILED.match(text):
            self._words = f"installed {_packages(self._all)}"
            return
        else:
            return
        self._words = self._downloading()

    def _downloading(self) -> str:
        words = f"downloading {_packages(self._all)}"
        if not self._begun:
            return words
        left = [shown for name, shown in self._begun.items() if name not in self._done]
        now = f", now {left[0]}" if left else ""
        return f"{words}: {len(self._begun) - len(left)} of {len(self._begun)} large ones done{now}"


def _packages(count: int) -> str:
    return f"{count} package{'' if count == 1 else 's'}" if count else "packages"

"""pip's settings as uv's variables: uv reads none of them, and a machine on a closed network often has only these."""

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fleet.reasons import Reason, StepError


class _Setting(NamedTuple):
    """One that both have."""

    uv: str
    older: str = ""
    """Another of uv's variables for the same: where that is set, nothing of pip's counts."""
    divider: str = " "
    """Between the parts of a list; pip takes blanks and lines."""


_SETTINGS = {
    "index-url": _Setting("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": _Setting("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": _Setting("UV_FIND_LINKS", divider=","),
    "no-index": _Setting("UV_NO_INDEX"),
    "cert": _Setting("SSL_CERT_FILE"),
    "trusted-host": _Setting("UV_INSECURE_HOST"),
    "constraint": _Setting("UV_CONSTRAINT"),
    "default-timeout": _Setting("UV_HTTP_TIMEOUT"),
    "timeout": _Setting("UV_HTTP_TIMEOUT"),
}
_SECTIONS = ("global", "install")
"""Of pip's files, the later ones over the earlier."""


def as_uv_reads(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that let uv find what pip would, but for those that uv has a setting of its own for.

    pip's variables come before its files; beside a uv.toml its files do not count. Of several indexes the best version
    is taken, as pip does. Raises StepError(INSTALL_FAILED) for a file of pip's that cannot be understood.
    """
    found = {} if any(path.exists() for path in _uv_files(environ)) else _written(_pip_files(environ))
    for name in _SETTINGS:
        if value := environ.get(f"PIP_{name.upper().replace('-', '_')}"):
            found[name] = value
    made: dict[str, str] = {}
    for name, setting in _SETTINGS.items():
        if name in found and not (environ.get(setting.uv) or environ.get(setting.older)):
            made[setting.uv] = setting.divider.join(found[name].split())
    if "UV_INDEX" in made and not environ.get("UV_INDEX_STRATEGY"):
        made["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # uv would look no further than the first that has the name
    return made


def _written(files: list[Path]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)  # one that is not there, or that we may not read, is passed over, as by pip
        except (configparser.Error, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0]
            raise StepError(Reason.INSTALL_FAILED, f"pip's settings in {file} cannot be read: {why}") from error
        for section in _SECTIONS:
            if parser.has_section(section):
                found |= {name.replace("_", "-"): value for name, value in parser.items(section) if value}
    return found


def _pip_files(environ: Mapping[str, str]) -> list[Path]:
    """In pip's order: the machine's, the user's, this environment's, and the one that a variable names."""
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return []
    shared = [Path(part) / "pip" for part in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if part]
    home = environ.get("HOME")
    own = [Path(home) / ".pip", _config_home(environ, home) / "pip"] if home and not Path(named).is_file() else []
    files = [directory / "pip.conf" for directory in (*shared, Path("/etc"), *own, Path(sys.prefix))]
    return [*files, Path(named)] if named else files


def _uv_files(environ: Mapping[str, str]) -> list[Path]:
    shared = [Path(part) / "uv" for part in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if part]
    home = environ.get("HOME")
    own = [_config_home(environ, home) / "uv"] if home else []
    files = [directory / "uv.toml" for directory in (*own, *shared, Path("/etc/uv"))]
    named = environ.get("UV_CONFIG_FILE")
    return [*files, Path(named)] if named else files


def _config_home(environ: Mapping[str, str], home: str) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path(home) / ".config")

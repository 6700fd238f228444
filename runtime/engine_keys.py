"""The key that engines ask of whoever speaks to them: read from a file, sent with requests, never written anywhere."""

import logging
import re
import stat
from collections.abc import Generator
from pathlib import Path

import httpx

from runtime.config import ConfigError

logger = logging.getLogger(__name__)

SHORTEST, LONGEST = 16, 512
"""Characters of a key: one that can be guessed is none, and a header has limits."""
MAX_FILE = 64 * 1024

_KEY = re.compile(r"[\x21-\x7e]+")


class EngineKeys:
    """The keys of a file, one a line, the newest first; read anew whenever the file has changed.

    A new engine is started with the first. The others are for engines that were started with an older one.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Without a file there is no key. Raises ConfigError with one sentence for a file that cannot be used."""
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._keys: tuple[str, ...] = ()
        self._trouble = ""
        if path is not None:
            self._seen, self._keys = _look(path), _read(path)

    @property
    def newest(self) -> str:
        """For an engine that is started now; "" where none is asked for."""
        keys = self.all()
        return keys[0] if keys else ""

    def all(self) -> tuple[str, ...]:
        """Those that engines may have; as they were before, where the file was spoilt meanwhile."""
        if self._path is None:
            return ()
        try:
            seen = _look(self._path)
            if seen != self._seen:
                self._keys = _read(self._path)
                self._seen, self._trouble = seen, ""
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.error("%s; the keys that were read before stay", error)
        return self._keys


class EngineAuth(httpx.Auth):
    """Sends the key as Bearer; where an engine refuses it, the older ones, and remembers which one fits."""

    def __init__(self, keys: EngineKeys) -> None:
        self._keys = keys
        self._fits: dict[bytes, str] = {}
        """Engine → its key, where that is not the newest."""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        keys = self._keys.all()
        engine = request.url.netloc
        known = self._fits.get(engine)
        ordered = keys if known not in keys else (known, *(key for key in keys if key != known))
        if not ordered:
            yield request
        for key in ordered:
            request.headers["Authorization"] = f"Bearer {key}"
            response = yield request
            if response.status_code == httpx.codes.UNAUTHORIZED:
                continue
            if key == keys[0]:
                self._fits.pop(engine, None)
            else:
                self._fits[engine] = key
            return


def _look(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror}); write it or name another file") from error
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as stream:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & stat.S_IRWXO:
                raise _unusable(path, f"everybody on this machine may use it (mode {mode:o}): chmod 600 it")
            content = stream.read(MAX_FILE + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror}); write it or name another file") from error
    if len(content) > MAX_FILE:
        raise _unusable(path, f"is larger than {MAX_FILE} bytes: a line for each key is all it holds")
    keys = []
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
        key = line.strip()
        if not key:
            continue
        if not _KEY.fullmatch(key):  # its text must not get into a message
            raise ConfigError(f"{path}:{number}: engine_key_file: a key is of visible ASCII characters, without blanks")
        if not SHORTEST <= len(key) <= LONGEST:
            raise ConfigError(f"{path}:{number}: engine_key_file: a key has {SHORTEST} to {LONGEST} characters")
        keys.append(key)
    if not keys:
        raise _unusable(path, "is empty: write a key into it, such as the output of `openssl rand -hex 32`")
    return tuple(keys)


def _unusable(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: engine_key_file: {what}")

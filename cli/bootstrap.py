"""Makes `.venv` from a lock with hashes, using nothing but Python and pip; the `ctl` wrapper runs it.

Usage: `python -I cli/bootstrap.py ROOT KIND STAMP [OTHER STAMP...]`. KIND names `requirements/KIND.txt`. STAMP is
written last, so that an environment with it is whole; one that already holds any of the stamps is left as it is.
"""

import ast
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL", " "),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", "", ","),
    "no-index": ("UV_NO_INDEX", "", " "),
    "cert": ("SSL_CERT_FILE", "", " "),
    "trusted-host": ("UV_INSECURE_HOST", "", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", "", " "),
    "timeout": ("UV_HTTP_TIMEOUT", "", " "),
}
"""By pip's name: uv's variable, an older one of uv's for the same, and what divides a list. Constraints are left out:
the lock says everything about versions."""
CUT_OUTPUT = 4000  # characters of a failed command's output: enough for the cause, not the whole download log


class SetupError(Exception):
    """`.venv` could not be made; the text says at which command and why."""


def main(root: Path, kind: str, stamps: tuple[str, ...]) -> None:
    """Make or update the environment. Concurrent calls wait for each other, and do the work once."""
    boot = root / ".venv.boot"
    boot.mkdir(exist_ok=True)
    with (boot / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another ctl is setting up .venv; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(root, stamps):
            _make(root, boot, kind, stamps[0])


def index_environment(environment: dict[str, str], configured: str) -> dict[str, str]:
    """uv reads none of pip's settings: carry over what it has a variable for, unless that is set already.

    `configured` is what `pip config list` prints: a line for each setting of pip's files and variables.
    """
    found = pip_settings(configured)
    made: dict[str, str] = {}
    for name, (variable, older, divider) in UV_VARIABLES.items():
        if name in found and not (environment.get(variable) or environment.get(older)):
            made[variable] = divider.join(found[name].split())
    if "UV_INDEX" in made and not environment.get("UV_INDEX_STRATEGY"):
        # As pip does: the best version of all indexes. uv would look no further than the first that has the name.
        made["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {**environment, **made}


def pip_settings(listed: str) -> dict[str, str]:
    """What an install would go by: variables before the files' section `install`, and that before `global`."""
    found: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section) and (text := str(ast.literal_eval(value))):
                found[name.replace("_", "-")] = text
    return found


def _is_whole(root: Path, stamps: tuple[str, ...]) -> bool:
    python, stamp = root / ".venv/bin/python", root / ".venv/llmgw-stamp"
    return os.access(python, os.X_OK) and stamp.is_file() and stamp.read_text().strip() in stamps


def _make(root: Path, boot: Path, kind: str, stamp: str) -> None:
    _say(f"setting up .venv from requirements/{kind}.txt")
    uv = _uv(root, boot)
    environment = index_environment(dict(os.environ), _pip_config())
    python = root / ".venv/bin/python"
    stamp_file = root / ".venv/llmgw-stamp"
    stamp_file.unlink(missing_ok=True)
    if not _runs(python):
        _run([str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(root / ".venv")], environment)
    lock = root / f"requirements/{kind}.txt"
    _run([str(uv), "pip", "sync", "--quiet", "--require-hashes", "--python", str(python), str(lock)], environment)
    partial = stamp_file.with_suffix(".partial")
    partial.write_text(f"{stamp}\n")
    partial.replace(stamp_file)


def _uv(root: Path, boot: Path) -> Path:
    lock = root / "requirements/uv.txt"
    uv = boot / "uv/bin/uv"
    copy = boot / "uv/uv.txt"  # written last: says which lock this uv came from
    if copy.is_file() and copy.read_bytes() == lock.read_bytes() and _runs(uv):
        return uv
    shutil.rmtree(boot / "uv", ignore_errors=True)
    # --target works where ensurepip is missing and where the environment belongs to the system's packager. A user's
    # own pip settings may ask for --user or for an active environment, and either would refuse it.
    environment = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    _run([*pip, "--target", str(boot / "uv"), "-r", str(lock)], environment)
    copy.write_bytes(lock.read_bytes())
    return uv


def _pip_config() -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    asked = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if asked.returncode:
        raise SetupError(f"{' '.join(command)}\nended with {asked.returncode}:\n{asked.stderr.strip()}")
    return asked.stdout


def _runs(binary: Path) -> bool:
    try:
        return subprocess.run([str(binary), "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-CUT_OUTPUT:].rstrip()}")


def _say(text: str) -> None:
    print(f"ctl: {text}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
    except SetupError as error:
        sys.exit(f"ctl: .venv could not be set up: {error}")
    except OSError as error:
        sys.exit(f"ctl: .venv could not be set up: {error.filename or ''}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)

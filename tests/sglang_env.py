"""An environment that has an engine as far as the agent can tell: the stand-in under its name, for `bin`."""

import subprocess
import sys
from pathlib import Path

import uv

from tests import tiny_checkpoint

STAND_IN = Path(__file__).parent / "fake_engines"


def make(place: Path, stand_in: Path = STAND_IN) -> Path:
    """Make it there, with SGLang's stand-in or another; returns its interpreter."""
    command = [uv.find_uv_bin(), "--quiet", "venv", "--python", sys.executable, str(place)]
    subprocess.run(command, check=True, capture_output=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "stand_in.pth").write_text(f"{stand_in}\n")
    return place / "bin" / "python"


def over_two_nodes(home: Path) -> dict[str, object]:
    """A job's input: a tiny checkpoint, made there, as one replica over two nodes."""
    return {
        "repo": f"file:{tiny_checkpoint.make(home / 'checkpoint')}",
        "name": "tiny",
        "engine": "sglang",
        "nodes": 2,
        "memory": "64MiB",
        "context_length": 512,
    }

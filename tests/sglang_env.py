"""An environment that has SGLang as far as the agent can tell: the stand-in under its name, for `bin`."""

import subprocess
import sys
from pathlib import Path

import uv

STAND_IN = Path(__file__).parent / "fake_engines"


def make(place: Path) -> Path:
    """Make it there; returns its interpreter."""
    command = [uv.find_uv_bin(), "--quiet", "venv", "--python", sys.executable, str(place)]
    subprocess.run(command, check=True, capture_output=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "stand_in.pth").write_text(f"{STAND_IN}\n")
    return place / "bin" / "python"

"""What an agent takes of its node's memory does not grow with what it moves."""

import os
import shutil
from pathlib import Path

import pytest

from tests.real_engine import MODEL
from tests.system import system

MIB = 1024**2
MOST = 150 * MIB
MOVED = 512 * MIB


@pytest.mark.usefixtures("real_engine")
async def test_an_agent_that_moves_a_model_stays_small(tmp_path: Path) -> None:
    """The model is followed by a hole: the engine does not mind, and the disk that it is read from has little to do."""
    large = tmp_path / "large.gguf"
    shutil.copy(os.environ[MODEL], large)
    os.truncate(large, MOVED)
    async with system(tmp_path / "system") as running:
        running.start_worker()
        running.start_agent("n1")
        await running.ready("n1")
        await (await running.serve(repo=f"file:{large}")).result()
        assert f"bytes={MOVED} " in running.log("n1")
        assert largest(running.processes["n1"].pid) < MOST


def largest(pid: int) -> int:
    """The most bytes of memory that a process ever had, pages of libraries included."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

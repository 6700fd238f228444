"""ctl as a person runs it: a process of its own, with a home of its own, against one Temporal."""

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.control import Cell

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ctl:
    """Runs ctl as a person would, against one Temporal."""

    environment: dict[str, str]

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "cli", *arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def run(self, *arguments: str) -> tuple[int | None, str, str]:
        process = await self.start(*arguments)
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode, out.decode(), err.decode()


def ctl_environment(home: Path, address: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TEMPORAL_", "LLMGW_"))}
    return {**kept, "LLMGW_HOME": str(home), "TEMPORAL_ADDRESS": address, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def ctl_of(cell: Cell, home: Path) -> Ctl:
    """With a home whose cell is this one."""
    home.mkdir()
    (home / "server.yaml").write_text(f"cell: {cell.name}\nmirror: {{path: mirror}}\n", encoding="utf-8")
    return Ctl(ctl_environment(home, cell.client.service_client.config.target_host))

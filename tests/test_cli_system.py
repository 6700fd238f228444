"""`ctl up`, `status` and `down` with the real parts, as a person runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.ctl import Ctl
from tests.system import free_ports

ROOT = Path(__file__).resolve().parent.parent


def of_this_home(home: Path) -> list[str]:
    """Command lines that name the home."""
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [" ".join(command) for command in found if any(str(home) in argument for argument in command)]


async def test_the_real_system_starts_is_seen_and_ends(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TEMPORAL_", "LLMGW_"))}
    first = free_ports(3)
    port, ui, gateway = (str(first + offset) for offset in range(3))
    ports = {"LLMGW_PORT": port, "LLMGW_UI_PORT": ui, "LLMGW_GATEWAY_PORT": gateway}
    ctl = Ctl({**kept, **ports, "LLMGW_HOME": str(home), "PYTHONPATH": str(ROOT)})
    try:
        code, out, err = await ctl.run("up")
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == f"up in {home}"
        code, out, _ = await ctl.run("status", "--json")
        status = json.loads(out)
        assert [process["state"] for process in status["processes"]] == ["running"] * 4
        assert status["temporal"] == f"127.0.0.1:{port}"
        assert status["gateway"] == f"http://127.0.0.1:{gateway}"
        assert [node["state"] for node in status["nodes"]] == ["ready"]
        assert status["models"] == []
        code, out, _ = await ctl.run("up")
        assert out == f"was up already in {home}\n"
        code, out, _ = await ctl.run("model", "serve", str(tmp_path / "none.gguf"))
        assert code == 1
        code, out, _ = await ctl.run("trace", "job/serve/none/1")
        assert code == 0
        assert any("✗ serve model" in line for line in out.splitlines())
    finally:
        code, out, _ = await ctl.run("down")
    assert out.splitlines() == ["stopped agent", "stopped gateway", "stopped worker", "stopped temporal", "down"]
    assert of_this_home(home) == []


def test_every_command_has_help_with_an_example() -> None:
    commands = (
        *("demo", "up", "down", "status", "reconcile", "trace", "test"),
        *("model serve", "model list", "model jobs", "model job cancel", "model remove"),
        *("node list", "replica list", "replica logs"),
    )
    script = f"""
import sys
from typer.testing import CliRunner
from cli.__main__ import app
for command in {commands!r}:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert f"Example: ctl {{command}}" in result.output, result.output
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("ok\n", "")

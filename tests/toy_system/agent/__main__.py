"""Joins, starts one "engine" in a session of its own with only an engine's environment, and waits for TERM.

A file `agent.dies` beside agent.yaml makes it die at its start; `agent.hangs` makes it wait for ever instead.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from activities.contract import fleet_id
from runtime.config import AgentConfig, load
from runtime.temporal import connect


async def main(path: Path) -> None:
    config = load(path, AgentConfig)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if path.with_name("agent.dies").exists():
        sys.exit("agent: no disk to keep the ledger on")
    if path.with_name("agent.hangs").exists():
        await stop.wait()
        return
    engine = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", "import signal; signal.pause()"],
        env={"LLMGW_RUN": str(config.data / "logs" / "m-0.0" / "1-1")},
        start_new_session=True,
    )
    config.data.mkdir(parents=True, exist_ok=True)
    (config.data / "engine.pid").write_text(str(engine.pid))
    client = await connect()
    fleet = client.get_workflow_handle(fleet_id(config.cell))
    await fleet.signal("joined", args=[config.node, uuid.uuid4().hex])
    await stop.wait()
    engine.terminate()
    engine.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--metrics-port", type=int, required=True)
    parser.add_argument("--stop-engines", action="store_true", required=True)
    asyncio.run(main(parser.parse_args().config))

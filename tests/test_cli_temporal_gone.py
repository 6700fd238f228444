"""What ctl says when Temporal goes away while it waits, and that it says nothing else."""

import asyncio
from pathlib import Path

from temporalio.testing import WorkflowEnvironment

from activities.contract import SEARCH_ATTRIBUTES
from cli.jobs import AWAY
from runtime.temporal import plugins, register_search_attributes
from tests.ctl import Ctl, ctl_environment
from tests.test_cli_jobs import TEMPORAL
from tests.test_cli_troubles import working


async def test_a_job_whose_temporal_goes_away_stays_and_ctl_says_so(tmp_path: Path) -> None:
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(TEMPORAL), plugins=plugins(), dev_server_log_level="error"
    ) as server:
        await register_search_attributes(server.client, SEARCH_ATTRIBUTES)
        ctl = Ctl(ctl_environment(tmp_path / "home", server.client.service_client.config.target_host))
        async with working(server.client):
            process = await ctl.start("model", "serve", "org/name", "--name", "slow")
            assert process.stderr is not None
            assert await process.stderr.readline() == "▸ check: running: looking\n".encode()
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, out) == (1, b"")
    *before, last = err.decode().splitlines()
    assert before in ([], [AWAY])  # the call that waits for the end may give up before the looks have been silent long
    assert last == (
        "ctl: Temporal does not answer any more: job/serve/slow/1 goes on when it is back (./ctl up starts it), "
        "and `ctl model job job/serve/slow/1` shows it"
    )

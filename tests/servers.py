"""Dev servers of one test's own: with settings the shared one must not have, or to be frozen."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import psutil
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities import contract
from runtime.temporal import llmgw_plugin, register_search_attributes
from tests.conftest import SERVER_ARGS, temporal_binary


@contextlib.contextmanager
def freeze(client: Client) -> Iterator[None]:
    """Within it the client's dev server is a stopped process: connections stay open, and nobody answers."""
    process = server_process(client.service_client.config.target_host)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def server_process(address: str) -> psutil.Process:
    """The dev server, a child of this process, that listens there."""
    port = address.rpartition(":")[2]
    children = psutil.Process().children(recursive=True)
    (found,) = (child for child in children if {"start-dev", port} <= set(_command(child)))
    return found


def _command(process: psutil.Process) -> list[str]:
    """Empty where it has ended and nobody has waited for it yet."""
    try:
        return process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return []


@contextlib.asynccontextmanager
async def own_server(**settings: int) -> AsyncIterator[WorkflowEnvironment]:
    """Start one, with values of its dynamic configuration (`limit__historyCount` stands for `limit.historyCount`)."""
    changed = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items()]
    extra = [part for value in changed for part in ("--dynamic-config-value", value)]
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(temporal_binary()),
        dev_server_extra_args=[*SERVER_ARGS, *extra],
        plugins=[llmgw_plugin()],
    )
    async with environment:
        await register_search_attributes(environment.client, contract.SEARCH_ATTRIBUTES)
        yield environment

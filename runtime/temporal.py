"""The one way to Temporal: connect, and the plugin that makes worker, agent, gateway, ctl and tests agree.

The plugin holds the strict pydantic converter, the failure exception types, the sandbox's pass-through modules, the
translation of our errors and the name of our build; beside it stands the OpenTelemetry plugin where tracing is on.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from opentelemetry import trace
from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.opentelemetry import OpenTelemetryPlugin, ReplaySafeTracerProvider
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter
from temporalio.envconfig import ClientConfigProfile
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig
from temporalio.service import RPCError
from temporalio.worker import WorkerConfig, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from fleet.inputs import input_sentence
from fleet.reasons import Reason
from runtime import VERSION
from runtime.interceptors import ActivityInterceptor
from runtime.payloads import LargePayloads
from runtime.updates import UpdateInterceptor

BAD_INPUT = Reason.BAD_INPUT.value
DEFAULT_ADDRESS = "127.0.0.1:7233"

CONNECT_S = 5.0
"""To connect takes milliseconds, and a second across the world. What accepts and stays silent never ends by itself."""
LISTEN_S = 1.0
"""For a look whether anything listens at all."""

LISTED_ATTEMPTS, LISTED_AGAIN_S = 300, 0.1
"""How long a new search attribute may take to be known: 0.1 s on the dev server, seconds on a cluster."""

PASS_THROUGH = (
    "activities",
    "fleet",
    "workflows",
    "runtime",
    "opentelemetry",
    "pydantic",
    "pydantic_core",
    "annotated_types",
)
"""Modules the sandbox takes as they are. Ours hold no state; re-importing them costs each workflow 1.5 MB and 8 ms."""


BUILD = f"llmgw-{VERSION}"
"""What a worker says it is. Without a name the SDK makes one of the code of every module that is loaded: 0.8 s of a
core, in which the process does nothing else; on a busy machine an agent that came back joined after its grace."""


class UnreachableError(Exception):
    """Temporal does not answer; the text says where and what to do."""


class StrictPayloadConverter(PydanticPayloadConverter):
    """Turns an input that does not fit its model into a failure at once: by default it would hang the workflow."""

    def from_payloads(self, payloads: Sequence[Payload], type_hints: list[type] | None = None) -> list[Any]:
        try:
            return super().from_payloads(payloads, type_hints)
        except ValidationError as error:
            raise ApplicationError(input_sentence(error), type=BAD_INPUT, non_retryable=True) from None


class LlmgwPlugin(SimplePlugin):
    """A `SimplePlugin` that also names the build."""

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        configured = super().configure_worker(config)
        configured["build_id"] = BUILD
        return configured


def plugins() -> list[Any]:
    """What every client and worker is made with. Call it after `runtime.tracing.install`."""
    found: list[Any] = [llmgw_plugin()]
    if isinstance(trace.get_tracer_provider(), ReplaySafeTracerProvider):
        found.append(OpenTelemetryPlugin(add_temporal_spans=False))
    return found


def llmgw_plugin() -> LlmgwPlugin:
    """Converter, errors, sandbox and build."""
    return LlmgwPlugin(
        "llmgw",
        data_converter=DataConverter(payload_converter_class=StrictPayloadConverter, payload_codec=LargePayloads()),
        interceptors=[ActivityInterceptor(), UpdateInterceptor()],
        workflow_runner=_with_pass_through,
        workflow_failure_exception_types=[ValidationError],
    )


def _with_pass_through(runner: WorkflowRunner | None) -> WorkflowRunner:
    if runner is None:
        raise ValueError("the worker has no workflow runner")
    if not isinstance(runner, SandboxedWorkflowRunner):
        return runner
    return dataclasses.replace(runner, restrictions=runner.restrictions.with_passthrough_modules(*PASS_THROUGH))


def silence_core() -> None:
    """Let the SDK's core write nothing: for a process whose errors a person reads. Before anything connects."""
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=LoggingConfig(filter="off"))))


async def connect(address: str = "", *, namespace: str = "", profile: str = "") -> Client:
    """Connect as the Temporal CLI would: `TEMPORAL_*` and its profiles first, then `address`, then the default.

    Raises UnreachableError with one sentence.
    """
    settings = ClientConfigProfile.load(profile=profile or None)
    target = settings.address or address or DEFAULT_ADDRESS
    space = settings.namespace or namespace or "default"
    chosen = dataclasses.replace(settings, address=target, namespace=space)
    return await _connected(target, Client.connect(**chosen.to_client_connect_config(), plugins=plugins()))


async def connect_exactly(address: str, namespace: str) -> Client:
    """Connect to this address, whatever the settings of the environment say. Raises UnreachableError."""
    return await _connected(address, Client.connect(address, namespace=namespace, plugins=plugins()))


async def _connected(target: str, connecting: Coroutine[Any, Any, Client]) -> Client:
    try:
        return await asyncio.wait_for(connecting, CONNECT_S)
    except (RPCError, RuntimeError, TimeoutError) as error:
        where = "set TEMPORAL_ADDRESS or TEMPORAL_PROFILE to where it runs"
        if isinstance(error, TimeoutError) and await _listens(target):
            raise UnreachableError(
                f"something listens at {target}, but it does not answer as Temporal does: see what holds the port, "
                f"or {where}"
            ) from error
        raise UnreachableError(f"Temporal is not reachable at {target}: start it (`./ctl up`), or {where}") from error


async def _listens(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), LISTEN_S)
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def register_search_attributes(client: Client, names: Sequence[str]) -> None:
    """Make sure these Keyword search attributes exist; a workflow that sets an unknown one is stuck.

    Adding one again is harmless, but adding one that exists with another type says yes and changes nothing: so list
    and compare. Raises UnreachableError with the sentence for either trouble.
    """
    service = client.operator_service
    keyword = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
    namespace = client.namespace
    there = await service.list_search_attributes(ListSearchAttributesRequest(namespace=namespace))
    wrong = [name for name in names if name in there.custom_attributes and there.custom_attributes[name] != keyword]
    if wrong:
        raise UnreachableError(
            f"search attribute {', '.join(wrong)} exists in namespace {namespace} with another type than Keyword: "
            f"remove it there (`temporal operator search-attribute remove`) and start again"
        )
    missing = {name: keyword for name in names if name not in there.custom_attributes}
    if missing:
        request = AddSearchAttributesRequest(namespace=namespace, search_attributes=missing)
        await service.add_search_attributes(request)
        await _until_listed(client, missing)


async def _until_listed(client: Client, names: Collection[str]) -> None:
    # Added is not yet known: a workflow task that comes first would fail and be tried again with growing waits.
    request = ListSearchAttributesRequest(namespace=client.namespace)
    for _ in range(LISTED_ATTEMPTS):
        there = await client.operator_service.list_search_attributes(request)
        if all(name in there.custom_attributes for name in names):
            return
        await asyncio.sleep(LISTED_AGAIN_S)
    raise UnreachableError(
        f"Temporal took the search attributes {', '.join(names)} and does not list them after "
        f"{LISTED_ATTEMPTS * LISTED_AGAIN_S:.0f} s: look at its log"
    )

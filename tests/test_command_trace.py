"""ctl's own span over what a command starts, and the caller's trace that goes on in it."""

import asyncio
import json
import shutil
import socket
from pathlib import Path

import pytest
from temporalio.client import Client

from activities.contract import CONTROL_QUEUE, MODEL_JOB_WORKFLOW
from cli.span_tree import tree
from cli.spans import Span
from cli.wall_time import covered
from tests.conftest import temporal_binary
from tests.control import control_plane
from tests.ctl import Ctl, ctl_environment
from tests.traced import WHOLE, spans_in

TRACE, PARENT = "ab" * 16, "cd" * 8
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def home(
    tmp_path: Path, tracing: str = "{enabled: true, file: 'traces/{service}.jsonl'}", *, cell: str = "main"
) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    (made / "server.yaml").write_text(f"cell: {cell}\nmirror: {{path: mirror}}\ntracing: {tracing}\n")
    return made


def ctl(client: Client, path: Path, **variables: str) -> Ctl:
    return Ctl({**ctl_environment(path, client.service_client.config.target_host), **variables})


def spans(path: Path) -> list[Span]:
    return list(spans_in(path / "traces").spans.values())


def root_of(path: Path) -> Span:
    """The command's own span."""
    (root,) = [span for span in spans(path) if span.name.startswith("ctl ")]
    return root


async def carried(client: Client, workflow_id: str) -> str:
    """The traceparent in the header of a workflow's start; "" where it carries none."""
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    fields = history.events[0].workflow_execution_started_event_attributes.header.fields
    return str(json.loads(fields["_tracer-data"].data)["traceparent"]) if "_tracer-data" in fields else ""


async def test_a_command_that_acts_is_a_root_and_its_job_hangs_beneath_it(client: Client, tmp_path: Path) -> None:
    path = home(tmp_path)
    code, out, err = await ctl(client, path).run("model", "serve", "o/n", "--name", "root-of-it", "--no-wait")
    assert code == 0, err
    root = root_of(path)
    assert (root.name, root.parent_id, root.service) == ("ctl model serve", "", "llmgw-ctl")
    assert await carried(client, out.strip()) == f"00-{root.trace_id}-{root.span_id}-01"
    # What it did until then: the job's trace goes on from there.
    parts = sorted((span for span in spans(path) if span != root), key=lambda span: span.start_ns)
    assert [span.name for span in parts] == ["start ctl", "connect", "start job"]
    assert {(span.trace_id, span.parent_id) for span in parts} == {(root.trace_id, root.span_id)}
    assert parts[0].start_ns == root.start_ns
    (top,) = tree(spans_in(path / "traces"), root.trace_id)
    assert covered((top,), (root.start_ns, parts[-1].end_ns)) >= WHOLE
    await client.get_workflow_handle(out.strip()).terminate()


async def test_what_a_command_waits_for_after_it_asked_is_in_its_trace(client: Client, tmp_path: Path) -> None:
    async with control_plane(client) as cell, cell.node("n1") as node, cell.node("n2") as other:
        await node.join()
        await cell.run({"repo": "file:/models/m.gguf", "name": "m"})
        path = home(tmp_path, cell=cell.name)
        draining = asyncio.create_task(ctl(client, path).run("node", "drain", node.name))
        await other.join()
        code, out, err = await draining
        assert (code, out.splitlines()[-1]) == (0, f"node {node.name} is empty"), err
    root = root_of(path)
    parts = sorted((span for span in spans(path) if span.parent_id == root.span_id), key=lambda span: span.start_ns)
    assert [span.name for span in parts] == ["start ctl", "connect", "tell fleet", "wait until empty"]
    (top,) = tree(spans_in(path / "traces"), root.trace_id)
    assert covered((top,), (root.start_ns, parts[-1].end_ns)) >= WHOLE


async def test_the_callers_trace_goes_on(client: Client, tmp_path: Path) -> None:
    path = home(tmp_path)
    mine = ctl(client, path, TRACEPARENT=TRACEPARENT)
    code, out, err = await mine.run("model", "serve", "o/n", "--name", "carried-on", "--no-wait")
    assert code == 0, err
    span = root_of(path)
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert await carried(client, out.strip()) == f"00-{TRACE}-{span.span_id}-01"
    await client.get_workflow_handle(out.strip()).terminate()


async def test_without_settings_it_is_passed_on_as_it_came(client: Client, tmp_path: Path) -> None:
    mine = ctl(client, tmp_path / "nowhere", TRACEPARENT=TRACEPARENT)
    code, out, err = await mine.run("model", "serve", "o/n", "--name", "passed-on", "--no-wait")
    assert code == 0, err
    assert await carried(client, out.strip()) == TRACEPARENT
    await client.get_workflow_handle(out.strip()).terminate()


@pytest.mark.parametrize("tracing", ["{enabled: false}", "{enabled: false, file: 'traces/x.jsonl'}"])
async def test_off_is_off_also_for_a_caller_with_a_trace(client: Client, tmp_path: Path, tracing: str) -> None:
    path = home(tmp_path, tracing)
    mine = ctl(client, path, TRACEPARENT=TRACEPARENT)
    code, out, err = await mine.run("model", "serve", "o/n", "--name", "off-is-off", "--no-wait")
    assert code == 0, err
    assert not (path / "traces").exists()
    assert await carried(client, out.strip()) == ""
    await client.get_workflow_handle(out.strip()).terminate()


async def test_a_command_that_fails_is_an_error_with_its_sentence(client: Client, tmp_path: Path) -> None:
    path = home(tmp_path)
    (path / "server.yaml").write_text((path / "server.yaml").read_text().replace("cell: main", "cell: nobody"))
    code, _, err = await ctl(client, path).run("model", "scale", "m", "2")
    assert code == 1
    span = root_of(path)
    assert span.name == "ctl model scale"
    assert span.error == err.removeprefix("ctl: ").strip()


async def test_a_command_that_only_looks_leaves_no_span(client: Client, tmp_path: Path) -> None:
    path = home(tmp_path)
    code, _, err = await ctl(client, path).run("model", "jobs")
    assert code == 0, err
    assert spans(path) == []


async def test_a_collector_that_never_answers_does_not_hold_the_prompt(client: Client, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        path = home(tmp_path, f"{{enabled: true, endpoint: 'http://127.0.0.1:{port}', protocol: http/protobuf}}")
        # The exporter itself would wait an hour.
        mine = ctl(client, path, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="3600")
        arguments = ("model", "serve", "o/n", "--name", "silent", "--no-wait")
        code, out, err = await asyncio.wait_for(mine.run(*arguments), 120.0)
        assert code == 0, err
        silent.settimeout(1.0)
        connection, _ = silent.accept()
        connection.close()
    await client.get_workflow_handle(out.strip()).terminate()


async def test_temporals_own_command_carries_a_trace_too(client: Client) -> None:
    binary = shutil.which("temporal", path=str(temporal_binary().parent))
    assert binary is not None
    process = await asyncio.create_subprocess_exec(
        *(binary, "workflow", "start", "--address", client.service_client.config.target_host),
        *("--type", MODEL_JOB_WORKFLOW, "--task-queue", CONTROL_QUEUE, "--workflow-id", "by-cli"),
        *("--input", '{"repo": "org/name"}', "--headers", f'_tracer-data={{"traceparent":"{TRACEPARENT}"}}'),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert await carried(client, "by-cli") == TRACEPARENT
    await client.get_workflow_handle("by-cli").terminate()

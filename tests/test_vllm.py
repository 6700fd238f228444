"""vLLM for real, on the CPU: served by the whole system, hung, killed, drained and stopped; and its own flags.

One engine serves them all in turn, since a start of it takes two cores for twenty seconds: the order of the tests is
that of its life.
"""

import asyncio
import contextlib
import functools
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from activities.node_contract import ShardRef
from agent.engines import ADAPTERS
from agent.engines.adapter import ExitStatus, Launch, gauge_sum
from agent.engines.vllm import TOLD
from agent.layout import Layout
from agent.supervisor import Supervisor
from fleet.engine_args import FLAGS, refused_args
from fleet.reasons import Reason
from fleet.spec import Engine
from fleet.state import ReplicaRecord
from tests import streams, tiny_checkpoint
from tests.otlp_receiver import Receiver, receiver
from tests.system import System, free_ports, system
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("real_vllm", "real_engine"), pytest.mark.timeout(1200)]

VLLM = ADAPTERS[Engine.VLLM]
START_S = 300.0
"""A start on two cores that others use too."""
HUNG_S = 8.0
"""Longer than any step of the tiny model on cores that others use too."""
LONG = 1900
"""Tokens of an answer: one or two seconds."""
MANY = 8
"""Twice as many as it works on at a time."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.make(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture(scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory, real_engine: None, real_vllm: Path, collector: Receiver
) -> AsyncIterator[System]:
    """One node that has vLLM."""
    async with system(tmp_path_factory.mktemp("vllm")) as made:
        made.start_worker()
        engines = {"vllm": {"bin": str(real_vllm)}}
        made.start_agent("n1", engines=engines, hung_after_s=HUNG_S, endpoint=collector.url)
        await made.ready("n1")
        yield made


@pytest.fixture(scope="module")
def gateway(running: System) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running.start_gateway(port)
    return f"http://127.0.0.1:{port}"


async def serving(running: System, after: int = 0) -> ReplicaRecord:
    found: ReplicaRecord | None = None

    async def there() -> bool:
        nonlocal found
        with contextlib.suppress(AssertionError):
            found = await running.serving(after=after)
        return found is not None

    await until(there, START_S)
    assert found is not None
    return found


async def counters(endpoint: str) -> tuple[int | None, int | None]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        text = (await http.get(f"{endpoint}/metrics")).text
    return VLLM.in_flight(text), VLLM.tokens(text)


async def told(endpoint: str) -> tuple[int | None, int | None]:
    """Requests by its own gauges alone, and as an agent counts them."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        text = (await http.get(f"{endpoint}/metrics")).text
    return gauge_sum(text, TOLD), VLLM.in_flight(text)


async def tell(endpoint: str, wanted: tuple[int, int]) -> None:
    async def there() -> bool:
        return await told(endpoint) == wanted

    await until(there, 60)


async def stopped_at_work(endpoint: str, worker: psutil.Process) -> "asyncio.Future[None]":
    """Ask for one long answer and stop the worker in the middle of it; the future ends with the answer."""
    while True:
        (_, before), (asked, ended) = await counters(endpoint), streams.begin(endpoint, 1, LONG)
        await until(functools.partial(begun, asked), 60)
        worker.send_signal(signal.SIGSTOP)
        (_, after) = await counters(endpoint)
        assert before is not None
        assert after is not None
        if after - before < LONG:
            return ended
        worker.send_signal(signal.SIGCONT)  # a busy machine came too late: the answer was made
        await ended


def begun(asked: list[streams.Stream]) -> bool:
    """Whether any of them has a piece of its answer."""
    return any(one.pieces for one in asked)


def hung(replica: ReplicaRecord) -> str:
    """As the agent's log says it."""
    return f"unhealthy replica=tiny-0 generation={replica.generation}: hangs: /health is fine, but nothing moved"


async def works(endpoint: str) -> bool:
    """Whether it has several requests in flight."""
    return 1 < ((await counters(endpoint))[0] or 0) <= MANY


def tree(running: System) -> dict[str, psutil.Process]:
    """The engine's processes by what they call themselves: the API server, its core and its worker."""
    found = {}
    for process in running.engines():
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in (process, *process.children(recursive=True)):
                line = " ".join(one.cmdline())
                for part in ("api_server", "EngineCore", "Worker"):
                    if part in line and "shim.py" not in line:
                        found[part] = one
    return found


async def test_served_through_the_gateway(running: System, gateway: str, checkpoint: Path) -> None:
    request: dict[str, Any] = {"repo": f"file:{checkpoint}", "name": "tiny", "context_length": 2048}
    result = await (await running.job({**request, "start_deadline_s": START_S})).result()
    assert result.sentence == "tiny is serving: 1 replica on n1"
    replica = await serving(running)
    assert set(tree(running)) == {"api_server", "EngineCore", "Worker"}

    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "temperature": 0}

    async def answered() -> str:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            answer = await http.post(f"{gateway}/v1/chat/completions", json=body)
        return str(answer.json()["choices"][0]["message"]["content"]) if answer.is_success else ""

    first = await until(answered, 60)
    assert len(first) == 20
    assert await answered() == first

    _, before = await counters(replica.endpoint)
    worker = tree(running)["Worker"]
    worker.send_signal(signal.SIGSTOP)  # or they may be over before a busy machine comes to look
    try:
        running_streams, ended = streams.begin(gateway, MANY, LONG)
        await until(lambda: works(replica.endpoint), 60)
    finally:
        worker.send_signal(signal.SIGCONT)
    await ended
    assert all(one.whole for one in running_streams)

    async def idle() -> bool:
        return (await counters(replica.endpoint))[0] == 0

    await until(idle, 60)
    _, after = await counters(replica.endpoint)
    assert before is not None
    assert after is not None
    assert after - before >= sum(one.pieces for one in running_streams)


async def test_its_own_spans_belong_to_the_start_and_to_the_request(running: System, collector: Receiver) -> None:
    replica = await serving(running)
    launch = next(span for span in collector.spans if span.name == "launch engine")

    def beneath() -> bool:
        """It sends what it has every five seconds."""
        own = [span for span in collector.spans if span.service == "llmgw-engine"]
        return any((span.trace, span.parent) == (launch.trace, launch.span) for span in own)

    await until(beneath, 60)
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        headers = {"traceparent": f"00-{trace}-{span}-01"}
        (await http.post(f"{replica.endpoint}/v1/chat/completions", json=body, headers=headers)).raise_for_status()
    await until(lambda: any((one.trace, one.parent) == (trace, span) for one in collector.spans), 60)


async def test_a_worker_that_hangs_is_seen_by_its_counters(running: System) -> None:
    """Health stays 200 all the while; the stop that follows must end a process that cannot answer TERM."""
    replica = await serving(running)
    old = tree(running)
    ended = await stopped_at_work(replica.endpoint, old["Worker"])
    await until(lambda: hung(replica) in running.log("n1"), 60)
    with contextlib.suppress(httpx.HTTPError):
        await ended
    await until(lambda: not any(one.is_running() for one in old.values()), 60)
    await serving(running, after=replica.generation)


async def test_its_gauges_are_late_and_the_count_of_its_requests_is_not(running: System) -> None:
    """What comes between two steps is in no gauge until the second has ended; who goes away is counted no more."""
    replica = await serving(running)
    worker = tree(running)["Worker"]
    first_ended = await stopped_at_work(replica.endpoint, worker)
    try:
        others, ended = streams.begin(replica.endpoint, 5 * MANY - 1, 20)
        await tell(replica.endpoint, (1, 5 * MANY))
        gone, cancelled = streams.begin(replica.endpoint, MANY, LONG)
        await tell(replica.endpoint, (1, 6 * MANY))
        cancelled.cancel()
        await tell(replica.endpoint, (1, 5 * MANY))
    finally:
        worker.send_signal(signal.SIGCONT)
    await asyncio.gather(first_ended, ended)
    assert all(one.whole for one in others)
    assert not any(one.pieces for one in gone)
    await tell(replica.endpoint, (0, 0))


@pytest.mark.parametrize("part", ["EngineCore", "Worker"])
async def test_what_hangs_with_nothing_to_do_is_found_by_the_first_that_waits(running: System, part: str) -> None:
    """Its gauges say for ever that nothing waits, and its health stays 200."""
    replica = await serving(running)
    old = tree(running)
    await tell(replica.endpoint, (0, 0))
    old[part].send_signal(signal.SIGSTOP)
    waiting, ended = streams.begin(replica.endpoint, 1, 5)
    await tell(replica.endpoint, (0, 1))
    await until(lambda: hung(replica) in running.log("n1"), 60)
    with contextlib.suppress(httpx.HTTPError):
        await ended
    assert not waiting[0].whole
    await until(lambda: not any(one.is_running() for one in old.values()), 60)
    await serving(running, after=replica.generation)


async def test_an_engine_whose_core_dies_exits_with_0_and_has_failed(running: System) -> None:
    replica = await serving(running)
    tree(running)["EngineCore"].kill()
    await until(lambda: "engine ended replica=tiny-0" in running.log("n1"), 60)
    line = next(line for line in running.log("n1").splitlines() if "engine ended replica=tiny-0" in line)
    assert "engine core exited unexpectedly; starting cleanup (exit code 0)" in line
    await serving(running, after=replica.generation)


async def test_a_drain_loses_no_stream_and_a_stop_ends_all(running: System) -> None:
    replica = await serving(running)
    there = tree(running)
    kept, ended = streams.begin(replica.endpoint, 6, LONG)  # more than it runs at once
    await until(lambda: all(one.begun for one in kept), 60)
    await running.fleet.execute_update("scale", {"name": "tiny", "replicas": 0})
    await ended
    assert [one.whole for one in kept] == [True] * 6
    await until(lambda: not any(one.is_running() for one in there.values()), 60)
    await until(lambda: running.engines() == [], 60)


# -- what a start that fails says, and its flags ----------------------------------------------------------------------


async def test_a_flag_it_does_not_know(tmp_path: Path, real_vllm: Path, checkpoint: Path) -> None:
    launch = Launch(
        host="127.0.0.1", port=free_ports(1), weights=checkpoint, entry="", weights_size=0, alias="tiny",
        context_length=512, concurrency=2, memory=0, args=("--no-such-flag",),
    )  # fmt: skip
    supervisor = Supervisor(Layout(tmp_path))
    stem = supervisor.next_stem(ShardRef(replica="tiny-0", generation=1))
    process = await supervisor.launch(stem, VLLM.command(real_vllm, launch), VLLM.environment(launch))
    try:
        status: ExitStatus | None = await until(lambda: supervisor.ended(process), START_S)
    finally:
        await supervisor.stop(process, 0)
    assert status is not None
    failure = VLLM.diagnose(status, supervisor.tail(stem))
    assert failure.reason is Reason.BAD_FLAG
    assert failure.detail.endswith("error: unrecognized arguments: --no-such-flag (exit code 2)")


OPTIONS = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(*make_arg_parser(FlexibleArgumentParser())._option_string_actions, sep="\\n")
"""


async def test_its_parser_knows_what_is_refused_and_only_that_is_refused(real_vllm: Path) -> None:
    command = [str(real_vllm), "-c", OPTIONS]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300, check=True)
    options = {line for line in done.stdout.splitlines() if line.startswith("-")}
    shut = set(FLAGS[Engine.VLLM].shut)
    assert len(options) > 300
    assert shut - options == set(), "a refused flag that this vLLM does not have"
    assert {option for option in options if refused_args(Engine.VLLM, (option,))} == shut

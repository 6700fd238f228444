"""Replicas by demand: what starts or has just started is not idle; and, with real processes and the real engine, a
model that goes to zero, is woken by a request through the gateway, and grows with its streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from fleet.commits import commit
from fleet.demand import target
from fleet.facts import ReplicaEvent, node_joined, replica_changed, used
from fleet.planning import next_deadline, plan
from fleet.spec import Scaling
from fleet.state import FleetState, ReplicaState
from fleet.steps import StepKind
from fleet.wishes import apply, drain_node
from tests.fleets import GIB, inventory, spec
from tests.gateway_fakes import free_port
from tests.system import System, system
from tests.waiting import until

TO_ZERO = Scaling(min=0, max=2, target_in_flight=1, idle_after_s=3, cooldown_s=1)


def placed(now: float) -> FleetState:
    """A model that may go to zero, just placed."""
    state = node_joined(FleetState(), "n1", "i1", inventory(), now)
    state, _ = apply(state, spec("m", scaling=TO_ZERO), now)
    return commit(state, plan(state, now), now)


def changed(state: FleetState, to: ReplicaState, now: float) -> FleetState:
    event = ReplicaEvent(replica="m-0", generation=1, state=to, endpoint="http://n1:1")
    return replica_changed(state, event, now)


def wanted(state: FleetState, now: float) -> int:
    return target(state.models["m"], list(state.replicas.values()), now).replicas


def test_a_model_whose_start_takes_longer_than_its_idle_time_is_not_stopped_before_it_serves() -> None:
    state = placed(100)
    assert [wanted(state, 100), wanted(state, 160)] == [1, 1]
    state = changed(state, ReplicaState.STARTING, 110)
    assert wanted(state, 160) == 1
    state = changed(state, ReplicaState.SERVING, 160)
    assert (wanted(state, 162.9), wanted(state, 163)) == (1, 0)
    assert next_deadline(state, 162) == 163


def test_a_start_that_its_nodes_drain_ends_leaves_no_second_answer() -> None:
    """Found by the state machine: the pass that ended the start still kept the model, and the next one gave it up."""
    state = drain_node(placed(100), "n1", 0.0, 101)
    decided = plan(state, 160)
    assert ([step.kind for step in decided.steps], decided.scaled) == ([StepKind.STOP], {"m": 0})
    assert plan(commit(state, decided, 160), 160).quiet


def test_a_start_that_gives_way_leaves_no_second_answer() -> None:
    """Found by the state machine too: the start that a more important model ended was all that kept its model."""
    state, _ = apply(placed(100), spec("vip", memory=16 * GIB, priority=90), 150)
    decided = plan(state, 160)
    assert [(step.kind, step.replica) for step in decided.steps if step.decision is None] == [(StepKind.PREEMPT, "m-0")]
    assert decided.scaled == {"m": 0}
    assert plan(commit(state, decided, 160), 160).quiet


def test_a_model_that_room_is_made_for_is_not_evicted_in_the_same_pass() -> None:
    """Found by the state machine: its old version was idle, and the room for its new one was then nobody's."""
    state = node_joined(FleetState(), "n1", "i1", inventory(memory=7 * GIB), 100)
    state = serving(apply(state, spec("a", memory=GIB, priority=0), 100)[0], 100)
    state = serving(apply(state, spec("b", memory=GIB, priority=0), 170)[0], 170)
    for priority, scaling in ((1, None), (0, Scaling(min=0, max=1, target_in_flight=1, idle_after_s=1000))):
        state, _ = apply(state, spec("b", memory=6 * GIB, priority=priority, scaling=scaling), 240)
        decided = plan(state, 310)
        state = commit(state, decided, 310)
        assert plan(state, 310).quiet
        if scaling is None:
            gone = ReplicaEvent(replica="a-0", generation=1, state=ReplicaState.DRAINED)
            state = replica_changed(state, gone, 320)
    assert {key: replica.state for key, replica in state.replicas.items()} == {
        "a-0": ReplicaState.STOPPING,
        "b-0": ReplicaState.SERVING,
    }
    assert state.models["a"].waiting == "a would fit, but that room is kept for b"


def test_a_start_that_a_new_version_ends_does_not_keep_its_model_from_being_idle() -> None:
    """Found by the state machine: the pass that ended it did not evict the model for another, and the next one did."""
    elastic = Scaling(min=0, max=2, target_in_flight=1, idle_after_s=1000)
    state = node_joined(FleetState(), "n1", "i1", inventory(memory=7 * GIB), 100)
    state = serving(apply(state, spec("b", memory=GIB, scaling=elastic), 100)[0], 100)
    state, _ = apply(state, spec("b", memory=5 * GIB, scaling=elastic), 110)
    state = commit(state, plan(state, 110), 110)
    assert [replica.state for replica in state.replicas.values()] == [ReplicaState.SERVING, ReplicaState.PLACED]
    state, _ = apply(state, spec("b", memory=6 * GIB, scaling=elastic), 120)
    state, _ = apply(state, spec("c", memory=7 * GIB), 130)
    decided = plan(state, 190)
    assert [(step.kind, step.replica) for step in decided.steps if step.decision is None] == [
        (StepKind.STOP, "b-1"),
        (StepKind.EVICT, "b-0"),
    ]
    assert plan(commit(state, decided, 190), 190).quiet


def serving(state: FleetState, now: float) -> FleetState:
    """A pass, and every replica of it serves."""
    state = commit(state, plan(state, now), now)
    for replica in list(state.replicas.values()):
        event = ReplicaEvent(
            replica=replica.id, generation=replica.generation, state=ReplicaState.SERVING, endpoint="http://n1:1"
        )
        state = replica_changed(state, event, now)
    return state


def test_one_that_is_woken_from_zero_lives_until_it_has_been_idle() -> None:
    state = changed(placed(100), ReplicaState.SERVING, 101)
    state = commit(state, plan(state, 104), 104)
    assert [step.kind for step in plan(state, 104).steps] == []
    state = replica_changed(state, ReplicaEvent(replica="m-0", generation=1, state=None), 105)
    assert wanted(state, 200) == 0
    state = used(state, "m", 200)
    assert wanted(state, 200) == 1
    state = commit(state, plan(state, 200), 200)
    assert state.replicas["m-1"].state is ReplicaState.PLACED
    assert wanted(state, 230) == 1


# -- with real processes ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def front_door(running: System) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway process that has read the routes."""
    port = free_port()
    running.start_gateway(port)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:

        async def ready() -> bool:
            try:
                return (await client.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, 30)
        yield client


def chat(tokens: int, *, stream: bool = False) -> dict[str, object]:
    message = {"role": "user", "content": "Count as far as you can."}
    # Without the end of the text, so that a stream is as long as it says.
    return {"model": "tiny", "messages": [message], "max_tokens": tokens, "stream": stream, "ignore_eos": True}


async def streamed(client: httpx.AsyncClient, over: asyncio.Event) -> int:
    """Streams one after another until `over`; how many there were."""
    count = 0
    while not over.is_set():
        async with client.stream("POST", "/v1/chat/completions", json=chat(400, stream=True)) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                assert "error" not in line
                if over.is_set():
                    break
        count += 1
    return count


@pytest.mark.usefixtures("real_engine")
async def test_a_model_goes_to_zero_is_woken_by_a_request_and_grows_with_its_streams(tmp_path: Path) -> None:
    scaling = {"min": 0, "max": 2, "target_in_flight": 1, "idle_after_s": 3, "cooldown_s": 1}
    async with system(tmp_path / "demand") as running:
        running.start_worker(tracing=False)
        running.start_agent("n1", tracing=False)
        async with front_door(running) as client:
            await running.ready("n1")
            await (await running.serve(scaling=scaling)).result()
            await until(lambda: running.serves(0), 60)
            assert (await running.state()).models["tiny"].scaled == 0
            assert running.engines() == []

            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=chat(8)) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [200] * 3
            assert all(answer.json()["choices"][0]["message"]["content"] for answer in answers)
            await until(lambda: running.serves(0), 60)

            # Idle for longer than a report may take: streams that go on must not look idle.
            await (await running.serve(scaling={**scaling, "idle_after_s": 60})).result()
            over = asyncio.Event()
            streams = [asyncio.create_task(streamed(client, over)) for _ in range(4)]
            try:
                await until(lambda: running.serves(2), 60)
            finally:
                over.set()
                counts = await asyncio.gather(*streams)
            assert min(counts) >= 1
            state = await running.state()
            assert state.models["tiny"].scaled == 2

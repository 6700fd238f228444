"""What wishes would come to, on values; and how a plan reads."""

import pytest

from fleet.commits import commit
from fleet.facts import Load, loaded
from fleet.forecast import PASSES, obeyed, passes, wish, wished_spec
from fleet.plan_text import explained_lines, plan_lines, verdict_line
from fleet.planning import plan
from fleet.reasons import LlmgwError, Reason
from fleet.spec import Constraints, Engine, Format, JobRequest, Rollout
from fleet.state import FleetState, Outcome, Verdict
from fleet.wishes import apply
from tests.fleets import GIB, fleet, inventory, spec

NOW = 100.0


def request(name: str = "m", **more: object) -> JobRequest:
    return JobRequest.model_validate({"name": name, "repo": f"file:/models/{name}.gguf", **more})


def served(nodes: dict[str, int], *requests: JobRequest) -> FleetState:
    """Nodes by their memory in GiB, and models that serve."""
    state = fleet({name: inventory(memory=memory * GIB) for name, memory in nodes.items()})
    for wanted in requests:
        made = spec(
            wanted.name or "",
            memory=int(wanted.memory or GIB),
            replicas=wanted.replicas,
            priority=wanted.priority,
            request=wanted,
        )
        state, _ = apply(state, made, 2.0)
    return obeyed(commit(state, plan(state, 3.0), 3.0), 4.0)


def told(state: FleetState, *requests: JobRequest, removed: tuple[str, ...] = ()) -> list[str]:
    wished, refused = wish(state, requests, removed, NOW)
    lines = [f"not planned: {one.model}: {one.sentence}" for one in refused]
    for number, one in enumerate(passes(wished, NOW), 1):
        lines += [f"pass {number}", *plan_lines(one.plan, one.state)]
    return lines


def test_a_new_model_is_placed_by_what_the_wish_says() -> None:
    assert told(served({"n1": 16}), request(memory="4GiB", replicas=2)) == [
        "pass 1",
        "scale up m-0 on n1: wanted 2, there are 0",
        "  fits 1 of 1 nodes, reserves 4 GiB",
        "scale up m-1 on n1: wanted 2, there are 1",
        "  fits 1 of 1 nodes, reserves 4 GiB",
    ]


def test_a_preemption_names_its_victim_and_what_comes_after() -> None:
    state = served({"n1": 16}, request("low", memory="10GiB", priority=10))
    state = loaded(state, "n1", "i1", (Load(replica="low-0", generation=1, in_flight=2),), 5.0)
    assert told(state, request("high", memory="12GiB", priority=90)) == [
        "pass 1",
        "preempt low-0 on n1: high is more important (90 against 10): frees 10 GiB on n1",
        "  its requests (2 in flight) may run out, for 30 s at most",
        "scale up high-0: wanted 1, there are 0",
        "  waits: 0/1 nodes fit high: 1 memory (need 12 GiB, best free 6 GiB on n1); room is being made",
        "scale up low-1: wanted 1, there are 0",
        "  waits: 0/1 nodes fit low: 1 memory (need 10 GiB, best free 6 GiB on n1)",
        "pass 2",
        "scale up high-0 on n1: wanted 1, there are 0",
        "  fits 1 of 1 nodes, reserves 12 GiB",
        "scale up low-1: wanted 1, there are 0",
        "  waits: 0/1 nodes fit low: 1 memory (need 10 GiB, best free 4 GiB on n1)",
    ]


def test_a_rollout_goes_pass_by_pass() -> None:
    lines = told(served({"n1": 16}, request(memory="4GiB")), request(memory="4GiB", context_length=4096))
    assert lines == [
        "pass 1",
        "scale up m-1 on n1: wanted 1, there are 0 of version 2",
        "  fits 1 of 1 nodes, reserves 4 GiB",
        "pass 2",
        "drain m-0 on n1: version 2 of the spec replaces version 1",
        "  frees 4 GiB, its requests may run out, for 30 s at most",
    ]


def test_what_is_removed_ends() -> None:
    assert told(served({"n1": 16}, request()), removed=("m",)) == [
        "pass 1",
        "drain m-0 on n1: m is removed",
        "  frees 1 GiB, its requests may run out, for 30 s at most",
    ]


def test_the_state_that_was_asked_about_is_left_as_it_was() -> None:
    state = served({"n1": 16}, request())
    before = state.model_copy(deep=True)
    told(state, request(replicas=3), request("new", memory="1GiB"), removed=("m",))
    assert state == before


def test_a_long_rollout_is_looked_ahead_only_so_far() -> None:
    before = request(memory="1GiB", replicas=20)
    after = request(memory="1GiB", replicas=20, args=["--x"], rollout=Rollout(max_surge=1))
    wished, _ = wish(served({"n1": 64}, before), [after], (), NOW)
    assert len(passes(wished, NOW)) == PASSES


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (request("new"), "say its memory, or apply it"),
        (JobRequest(name="new", repo="org/name", memory=GIB), "say its engine, or apply it"),
        (JobRequest(name="new", repo="org/name"), "say its memory and engine, or apply it"),
        (JobRequest(name="new", repo="ftp://x"), "ftp://x"),
    ],
)
def test_what_cannot_be_told_is_a_sentence_and_the_rest_is_planned(wanted: JobRequest, sentence: str) -> None:
    state = served({"n1": 16})
    _, [refused] = wish(state, [wanted], (), NOW)
    assert refused.model == "new"
    assert sentence in refused.sentence
    assert told(state, wanted, request(memory="1GiB"))[1:3] == ["pass 1", "scale up m-0 on n1: wanted 1, there are 0"]


def test_a_model_that_is_being_removed_cannot_be_planned() -> None:
    state = served({"n1": 16}, request())
    removed, _ = wish(state, (), ("m",), NOW)
    _, [refused] = wish(removed, [request()], (), NOW)
    assert refused.sentence == "model m is being removed: apply it again when it is gone"


def test_the_spec_of_a_repo_that_is_known() -> None:
    state = served({"n1": 16}, request(memory="4GiB"))
    role = Constraints(role="gpu")
    again = wished_spec(state, request(memory="4GiB", replicas=2, priority=7, constraints=role))
    assert (again.need.memory, again.weights.model_id, again.replicas, again.priority) == (4 * GIB, "m-abc", 2, 7)
    assert (again.context_length, again.constraints.role) == (2048, "gpu")
    other = wished_spec(state, request("other", repo="file:/models/m.gguf", memory="2GiB", context_length=512))
    assert (other.name, other.need.memory, other.weights.model_id) == ("other", 2 * GIB, "m-abc")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"context_length": 8192}, "context_length"),
        ({"concurrency": 16}, "concurrency"),
        ({"gpus": 2}, "gpus"),
        ({"engine": "vllm"}, "engine"),
        ({"gpus": 2, "context_length": 8192}, "gpus and context_length"),
    ],
)
def test_an_estimate_is_not_reused_for_what_it_was_not_made_for(change: dict[str, object], named: str) -> None:
    estimated, _ = apply(served({"n1": 16}), spec("m", request=request(), memory=4 * GIB), 2.0)
    assert wished_spec(estimated, request(replicas=3, priority=9)).need.memory == 4 * GIB
    assert wished_spec(estimated, request("m", memory="5GiB", **change)).need.memory == 5 * GIB
    with pytest.raises(LlmgwError) as caught:
        wished_spec(estimated, request("m", **change))
    assert caught.value.failure.detail == (
        f"what it needs is estimated anew, as its {named} changed: say its memory, or apply it"
    )


def test_a_number_that_was_said_is_no_estimate_for_when_none_is_said() -> None:
    with pytest.raises(LlmgwError, match="estimated anew, as its memory changed"):
        wished_spec(served({"n1": 16}, request(memory="4GiB")), request())


def test_the_spec_of_a_repo_that_is_new() -> None:
    made = wished_spec(served({}), JobRequest.model_validate({"name": "v", "repo": "org/v:Q4_K_M", "memory": "3GiB"}))
    assert (made.engine, made.weights.format, made.need.memory) == (Engine.LLAMACPP, Format.GGUF, 3 * GIB)
    with pytest.raises(LlmgwError) as caught:
        wished_spec(served({}), request("new"))
    assert caught.value.failure.reason is Reason.FIT_UNKNOWN


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (
            Verdict(node="n1", outcome=Outcome.FITS, need=1, free=2, score=3.5, parts={"spread": 1.0, "best_fit": 0.5}),
            "n1 fits, score 3.50: best_fit 0.50, spread 1.00",
        ),
        (Verdict(node="n2", outcome=Outcome.EXCLUDED, reason=Reason.LABELS), "n2 excluded: labels"),
        (
            Verdict(
                node="n3",
                outcome=Outcome.REFUSED,
                reason=Reason.MEMORY,
                need=8 * GIB,
                free=GIB,
                capacity=16 * GIB,
                foreign=3 * GIB,
                holder=41,
            ),
            "n3 refused: memory, need 8 GiB, free 1 GiB of 16 GiB, 3 GiB held by pid 41 and others",
        ),
        (
            Verdict(node="n4", outcome=Outcome.REFUSED, reason=Reason.GPU_COUNT, need=4, free=2, capacity=2),
            "n4 refused: gpu_count, need 4, there are 2",
        ),
    ],
)
def test_a_verdict_as_a_line(verdict: Verdict, line: str) -> None:
    assert verdict_line(verdict) == line


def test_an_explained_plan_has_every_nodes_answer() -> None:
    state = fleet({"n1": inventory(), "n2": inventory(engines=())}, spec("m"))
    assert explained_lines(plan(state, NOW), state) == [
        "scale up m-0 on n1: wanted 1, there are 0",
        "  fits 1 of 2 nodes, reserves 1 GiB",
        "    n1 fits, score 4.06: best_fit 0.06, preferred 0.00, spread 1.00, weights_local 0.00",
        "    n2 excluded: engine_missing",
    ]


def test_gpus_stand_behind_their_node() -> None:
    state = fleet({"n1": inventory(gpus=(8 * GIB, 8 * GIB))}, spec("m", memory=4 * GIB, gpus=2))
    assert plan_lines(plan(state, NOW), state) == [
        "scale up m-0 on n1 (GPU-0, GPU-1): wanted 1, there are 0",
        "  fits 1 of 1 nodes, reserves 8 GiB",
    ]

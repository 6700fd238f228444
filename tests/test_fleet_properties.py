"""Something bad never happens: a random fleet driven through hundreds of changes, passes and reports.

The machine plays the outside world: nodes that come, go and return, replicas that start, fail, drain and stop late
or twice. Properties are those of the planner's contract.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.commits import commit, moved
from fleet.facts import ReplicaEvent, node_joined, node_lost, replica_changed
from fleet.planning import next_deadline, plan
from fleet.reasons import Failure, Reason, RefusedError
from fleet.standing import over_capacity
from fleet.state import HOLDING, FleetState, NodeState, ReplicaState
from fleet.wishes import apply, cordon, remove
from tests.fleets import GIB, inventory, spec

NODES = ("n1", "n2", "n3")
MODELS = ("a", "b", "c")
REASONS = (Reason.EXITED, Reason.WEIGHTS_UNREADABLE, Reason.NODE_LOST, Reason.GPU_OUT_OF_MEMORY)


class FleetMachine(RuleBasedStateMachine):
    """One fleet and its world."""

    def __init__(self) -> None:
        super().__init__()
        self.state = FleetState()
        self.now = 1_000.0
        self.incarnation = 0
        self.generations: dict[str, int] = {}

    def tick(self, seconds: float = 0.5) -> float:
        self.now += seconds
        return self.now

    @rule(node=st.sampled_from(NODES), memory=st.integers(1, 8), gpus=st.lists(st.integers(1, 4), max_size=3))
    def join(self, node: str, memory: int, gpus: list[int]) -> None:
        # A node that returns with less memory than is reserved on it must not lose what runs there: sizes only grow.
        old = self.state.nodes.get(node)
        if old is not None:
            found = old.inventory
        else:
            found = inventory(memory=memory * GIB, gpus=tuple(size * GIB for size in gpus))
        self.incarnation += 1
        self.state = node_joined(self.state, node, f"i{self.incarnation}", found, self.tick())

    @rule(node=st.sampled_from(NODES))
    def lose(self, node: str) -> None:
        if node in self.state.nodes:
            self.state = node_lost(self.state, node, self.state.nodes[node].incarnation, "silent", self.tick())

    @rule(node=st.sampled_from(NODES), cordoned=st.booleans())
    def cordon(self, node: str, cordoned: bool) -> None:
        try:
            self.state = cordon(self.state, node, cordoned, self.tick())
        except RefusedError:
            assert node not in self.state.nodes or self.state.nodes[node].state is NodeState.LOST

    @rule(
        model=st.sampled_from(MODELS),
        memory=st.integers(1, 4),
        gpus=st.integers(0, 2),
        replicas=st.integers(0, 3),
        priority=st.integers(0, 3),
    )
    def apply(self, model: str, memory: int, gpus: int, replicas: int, priority: int) -> None:
        wanted = spec(model, memory=memory * GIB, gpus=gpus, replicas=replicas, priority=priority)
        try:
            self.state, applied = apply(self.state, wanted, self.tick())
        except RefusedError:
            assert self.state.models[model].removing
        else:
            again, second = apply(self.state, wanted, self.now)
            assert not second.changed
            assert again.models[model].spec_version == applied.spec_version

    @rule(model=st.sampled_from(MODELS))
    def remove(self, model: str) -> None:
        if model in self.state.models:
            self.state = remove(self.state, model)

    @rule(seconds=st.sampled_from([0.1, 2.0, 40.0, 700.0]))
    def run_pass(self, seconds: float) -> None:
        now = self.tick(seconds)
        decided = plan(self.state, now)
        assert decided == plan(self.state, now), "the same arguments give the same plan"
        assert moved(self.state, decided) == ()
        self.state = commit(self.state, decided, now)
        again = plan(self.state, now)
        # Reaping frees what the next pass places; apart from that a plan leaves nothing for another.
        reaped = {step.replica for step in decided.steps if step.kind.value == "reap"}
        assert all(step.replica in reaped or bool(reaped) for step in again.steps), again.steps

    @precondition(lambda self: bool(self.state.replicas))
    @rule(
        data=st.data(), state=st.sampled_from([*ReplicaState, None]), old=st.booleans(), reason=st.sampled_from(REASONS)
    )
    def report(self, data: st.DataObject, state: ReplicaState | None, old: bool, reason: Reason) -> None:
        replica = self.state.replicas[data.draw(st.sampled_from(sorted(self.state.replicas)))]
        generation = replica.generation - old
        failure = Failure(reason=reason, detail="it broke") if state is ReplicaState.FAILED else None
        event = ReplicaEvent(
            replica=replica.id, generation=generation, state=state, endpoint="http://e", failure=failure
        )
        before = self.state
        self.state = replica_changed(self.state, event, self.tick())
        if old:
            assert self.state is before

    @invariant()
    def no_device_is_sold_twice(self) -> None:
        assert over_capacity(self.state) == ()

    @invariant()
    def replicas_are_whole_or_hold_nothing(self) -> None:
        for replica in self.state.replicas.values():
            assert bool(replica.shards) == (replica.state in HOLDING), replica

    @invariant()
    def generations_only_grow(self) -> None:
        for replica in self.state.replicas.values():
            assert replica.generation >= self.generations.get(replica.id, 0)
            self.generations[replica.id] = replica.generation
        assert len({replica.generation for replica in self.state.replicas.values()}) == len(self.state.replicas)

    @invariant()
    def the_fleet_settles(self) -> None:
        """In a bounded number of passes with a world that obeys, what can serve serves, and nothing is left to do."""
        state, now = self.state, self.now
        for _ in range(40):
            due = next_deadline(state, now)
            decided = plan(state, now)
            after = obey(commit(state, decided, now), now)
            if not decided.steps and due is None and after is state:
                break
            state = after
            now = max(now, due or now) + 0.01
        else:
            raise AssertionError(f"still busy after 40 passes: {plan(state, now).steps} {next_deadline(state, now)}")
        for model in state.models.values():
            assert not model.removing
            mine = [replica for replica in state.replicas.values() if replica.model == model.spec.id]
            current = [replica for replica in mine if replica.spec_version == model.spec_version]
            assert len([r for r in current if r.state in HOLDING]) <= model.spec.replicas
            if len([r for r in current if r.state is ReplicaState.SERVING]) < model.spec.replicas:
                assert model.waiting or any(replica.given_up for replica in current), model


def obey(state: FleetState, now: float) -> FleetState:
    """What is asked for happens."""
    follows = {
        ReplicaState.PLACED: ReplicaState.SERVING,
        ReplicaState.STARTING: ReplicaState.SERVING,
        ReplicaState.DRAINING: ReplicaState.DRAINED,
        ReplicaState.STOPPING: None,
    }
    for replica in list(state.replicas.values()):
        if replica.state in follows:
            event = ReplicaEvent(
                replica=replica.id, generation=replica.generation, state=follows[replica.state], endpoint="http://e"
            )
            state = replica_changed(state, event, now)
    return state


FleetMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFleet = FleetMachine.TestCase

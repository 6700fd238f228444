"""Something bad never happens: a random fleet driven through hundreds of changes, passes and reports.

The machine plays the outside world: nodes that come, go and return, replicas that start, fail, drain and stop late
or twice. Properties are those of the planner's contract.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet.commits import commit, moved
from fleet.demand import LOADED
from fleet.facts import Load, ReplicaEvent, loaded, node_joined, node_lost, node_measured, replica_changed, used
from fleet.measures import contradiction
from fleet.planning import next_deadline, plan
from fleet.reasons import Failure, Reason, RefusedError
from fleet.room import room_of
from fleet.spec import Constraints, Rollout, Scaling
from fleet.standing import over_capacity, oversold, wanted
from fleet.state import CPU, HOLDING, Device, FleetState, NodeState, ReplicaState
from fleet.steps import Plan, StepKind
from fleet.wishes import apply, cordon, drain_node, release_brake, remove
from tests.fleets import GIB, inventory, spec

NODES = ("n1", "n2", "n3")
MODELS = ("a", "b", "c")
SCALINGS = st.builds(
    Scaling, min=st.integers(0, 1), max=st.integers(1, 3), target_in_flight=st.just(2.0), idle_after_s=st.just(100.0)
)
ROLLOUTS = st.sampled_from(
    [Rollout(), Rollout(max_surge=0, max_unavailable=1), Rollout(recreate=True), Rollout(max_surge=2)]
)
CONSTRAINTS = st.sampled_from(
    [Constraints()] * 4
    + [
        Constraints(labels={"zone": "a"}),
        Constraints(prefer={"zone": "b"}),
        Constraints(role="big"),
        Constraints(interconnect="zone"),
        Constraints(gpu_model="h100"),
    ]
)
LIES = st.builds(
    Device,
    uuid=st.sampled_from([CPU, "GPU-0", "GPU-0", "GPU-1", ""]),
    model=st.sampled_from(["H100", "MI300X", ""]),
    total=st.sampled_from([-1, 0, 1, GIB, 4 * GIB, 2**60]),
    foreign=st.sampled_from([0, 0, -GIB, GIB, 2**61]),
)
"""A device as a node may tell of it that is broken, or wrong."""
REASONS = (Reason.EXITED, Reason.WEIGHTS_UNREADABLE, Reason.NODE_LOST, Reason.GPU_OUT_OF_MEMORY)


class FleetMachine(RuleBasedStateMachine):
    """One fleet and its world."""

    def __init__(self) -> None:
        super().__init__()
        self.state = FleetState()
        self.now = 1_000.0
        self.incarnation = 0
        self.generations: dict[str, int] = {}
        self.liars: set[str] = set()

    def tick(self, seconds: float = 0.5) -> float:
        self.now += seconds
        return self.now

    @initialize(sizes=st.lists(st.integers(2, 8), min_size=1, max_size=3))
    def begin(self, sizes: list[int]) -> None:
        """Some nodes are there, so that most of what follows has somewhere to go."""
        for node, memory in zip(NODES, sizes, strict=False):
            self.join(node=node, memory=memory, gpus=[4, 4])

    @rule(seconds=st.sampled_from([0.1, 2.0, 70.0]))
    def go_on(self, seconds: float) -> None:
        """A pass, and a world that does what it is told."""
        self.run_pass(seconds=seconds)
        self.state = obey(self.state, self.now)

    @rule(node=st.sampled_from(NODES), memory=st.integers(1, 8), gpus=st.lists(st.integers(1, 4), max_size=3))
    def join(self, node: str, memory: int, gpus: list[int]) -> None:
        # A node that returns with less memory than is reserved on it must not lose what runs there: sizes only grow.
        old = self.state.nodes.get(node)
        if old is not None:
            found = old.inventory
        else:
            labels = {"zone": "b" if node == "n3" else "a"} if gpus else {}
            sizes = tuple(size * GIB for size in gpus)
            roles = ("big",) if memory > 4 else ()
            found = inventory(memory=memory * GIB, gpus=sizes, labels=labels, roles=roles, disk=memory * GIB)
        self.incarnation += 1
        self.state = node_joined(self.state, node, f"i{self.incarnation}", found, self.tick())

    @rule(
        node=st.sampled_from(NODES),
        devices=st.lists(LIES, max_size=4),
        disk=st.sampled_from([-GIB, 0, GIB, 2**62]),
        weights=st.lists(st.sampled_from([f"{model}-abc" for model in MODELS]), max_size=2),
        anew=st.booleans(),
    )
    def lie(self, node: str, devices: list[Device], disk: int, weights: list[str], anew: bool) -> None:
        """Devices vanish, double, shrink or change their vendor; an old agent speaks again; disk is less than none."""
        told = inventory(devices=tuple(devices), disk=disk, weights=tuple(weights))
        before = self.state
        old = before.nodes.get(node)
        try:
            if anew or old is None:
                self.state = node_joined(before, node, "i1", told, self.tick())
            else:
                self.state = node_measured(before, node, old.incarnation, told)
        except RefusedError:
            assert contradiction(told)
        if contradiction(told):
            assert self.state is before
        else:
            self.liars.add(node)

    @rule(node=st.sampled_from(NODES))
    def measure(self, node: str) -> None:
        """What was fetched is there now, and the disk is that much fuller."""
        record = self.state.nodes.get(node)
        if record is None:
            return
        held, free = set(record.inventory.weights), record.inventory.disk_free
        for replica in self.state.replicas.values():
            for shard in replica.shards:
                if shard.node == node and replica.state is ReplicaState.SERVING and shard.weights not in held:
                    held.add(shard.weights)
                    free -= shard.disk
        update = {"weights": tuple(sorted(held)), "disk_free": free}
        found = record.inventory.model_copy(update=update)
        self.state = node_measured(self.state, node, record.incarnation, found)

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
        scaling=st.none() | SCALINGS,
        rollout=ROLLOUTS,
        shards=st.sampled_from([1, 1, 1, 2]),
        constraints=CONSTRAINTS,
        disk=st.sampled_from([1, 1, 2, 5]),
    )
    def apply(
        self,
        model: str,
        memory: int,
        gpus: int,
        replicas: int,
        priority: int,
        scaling: Scaling | None,
        rollout: Rollout,
        shards: int,
        constraints: Constraints,
        disk: int = 1,
    ) -> None:
        asked = spec(
            model,
            memory=memory * GIB,
            gpus=gpus,
            replicas=replicas,
            priority=priority,
            scaling=scaling,
            rollout=rollout,
            shards=shards,
            constraints=constraints,
            disk=disk * GIB,
        )
        try:
            self.state, applied = apply(self.state, asked, self.tick())
        except RefusedError:
            assert self.state.models[model].removing
        else:
            again, second = apply(self.state, asked, self.now)
            assert not second.changed
            assert again.models[model].spec_version == applied.spec_version

    @rule(
        model=st.sampled_from(MODELS),
        memory=st.integers(1, 6),
        replicas=st.integers(1, 3),
        priority=st.integers(0, 3),
        idle=st.booleans(),
    )
    def crowd(self, model: str, memory: int, replicas: int, priority: int, idle: bool) -> None:
        """A plain model that takes much of the room, and a pass: others must wait, evict or preempt."""
        scaling = Scaling(min=0, max=replicas, target_in_flight=1.0, idle_after_s=1_000.0) if idle else None
        self.apply(
            model=model,
            memory=memory,
            gpus=0,
            replicas=replicas,
            priority=priority,
            scaling=scaling,
            rollout=Rollout(),
            shards=1,
            constraints=Constraints(),
        )
        self.go_on(seconds=70.0)

    @rule(node=st.sampled_from(NODES), deadline=st.sampled_from([0.0, 30.0]))
    def drain(self, node: str, deadline: float) -> None:
        try:
            self.state = drain_node(self.state, node, deadline, self.tick())
        except RefusedError:
            assert node not in self.state.nodes or self.state.nodes[node].state is NodeState.LOST

    @rule()
    def release(self) -> None:
        self.state = release_brake(self.state)
        assert self.state.brake == ""

    @rule(model=st.sampled_from(MODELS))
    def ask_for(self, model: str) -> None:
        self.state = used(self.state, model, self.tick())

    @rule(in_flight=st.integers(0, 20))
    def load(self, in_flight: int) -> None:
        for node in self.state.nodes.values():
            loads = tuple(
                Load(replica=r.id, generation=r.generation, in_flight=in_flight)
                for r in self.state.replicas.values()
                if node.id in r.nodes
            )
            self.state = loaded(self.state, node.id, node.incarnation, loads, self.tick())

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
        before = self.state
        self.state = commit(before, decided, now)
        assert oversold(before, self.state) == ()
        again = plan(self.state, now)
        # Reaping frees what the next pass places; apart from that a plan leaves nothing for another.
        if not any(step.kind is StepKind.REAP for step in decided.steps):
            assert again.steps == (), again
            assert again.scaled == {}, again
            # But for the words of one that asked for room in vain, and that the same plan then ended as idle.
            assert plan(commit(self.state, again, now), now).quiet, again
        self.victims_are_less_important(before, decided)

    def victims_are_less_important(self, before: FleetState, decided: Plan) -> None:
        """Preemption takes strictly lower priorities, eviction idle models that may go to zero."""
        for step in decided.steps:
            victim = self.state.models[step.model].spec if step.model in self.state.models else None
            if step.kind is StepKind.PREEMPT:
                assert victim is not None
                assert any(model.spec.priority > victim.priority for model in self.state.models.values())
            if step.kind is StepKind.EVICT:
                assert victim is not None
                assert victim.scaling is not None
                assert victim.scaling.min == 0
                working = [one.id for one in before.replicas.values() if one.model == step.model and one.in_flight]
                assert not [name for name in working if before.replicas[name].state in LOADED], "not idle: it works"

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
    def no_device_or_disk_is_sold_twice(self) -> None:
        """Where nodes measure honestly; what liars take back was promised before."""
        assert [name for name in over_capacity(self.state) if name.partition("/")[0] not in self.liars] == []

    @invariant()
    def disk_is_kept_for_what_is_on_its_way(self) -> None:
        room = room_of(self.state)
        for node in self.state.nodes.values():
            absent = {
                shard.weights: shard.disk
                for replica in self.state.replicas.values()
                for shard in replica.shards
                if shard.node == node.id and shard.weights not in node.inventory.weights
            }
            assert room.disk_kept(node.id) == sum(absent.values())

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
            goal = wanted(state, model)
            assert len([r for r in current if r.state in HOLDING]) <= goal
            if len([r for r in mine if r.state is ReplicaState.SERVING]) < goal:
                lost = [name for r in mine for name in r.nodes if state.nodes[name].state is NodeState.LOST]
                assert model.waiting or any(replica.given_up for replica in current) or lost, model


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

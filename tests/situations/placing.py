"""Where a replica goes, and why nowhere."""

from fleet.facts import node_lost
from fleet.spec import Constraints, Engine
from fleet.state import CPU, Device, EngineOffer
from fleet.wishes import cordon, drain_node
from tests.situations.fleets import GIB, Moment, cards, fleet, gpu, inventory, served, spec, wanted

VLLM_ONLY = (EngineOffer(engine=Engine.VLLM, version="1", installed=True),)


def first_placement() -> Moment:
    """Three nodes are alike: the first of them takes the model."""
    return Moment(fleet({"n1": inventory(), "n2": inventory(), "n3": inventory()}, spec("m", memory=4 * GIB)), 10.0)


def no_node_has_joined() -> Moment:
    """A model is wanted before there is any node."""
    return Moment(fleet({}, spec("m")), 10.0)


def weights_already_there() -> Moment:
    """The node that has the weights wins, although its disk is full."""
    nodes = {"n1": inventory(), "n2": inventory(weights=("m-abc",), disk_free=0)}
    return Moment(fleet(nodes, spec("m")), 10.0)


def best_fit() -> Moment:
    """The node on which the least is left wins: the large gap stays for large models."""
    nodes = {"n1": inventory(memory=64 * GIB), "n2": inventory(memory=8 * GIB), "n3": inventory(memory=GIB)}
    return Moment(fleet(nodes, spec("m", memory=6 * GIB)), 10.0)


def spread() -> Moment:
    """Three replicas go to two nodes: each takes one before either takes a second."""
    nodes = {"n1": inventory(memory=8 * GIB), "n2": inventory(memory=64 * GIB)}
    return Moment(fleet(nodes, spec("m", memory=2 * GIB, replicas=3)), 10.0)


def part_of_a_gpu() -> Moment:
    """Two small models share one GPU, so that the other stays whole for the one that needs all of it."""
    nodes = {"n1": inventory(gpus=(24 * GIB, 24 * GIB))}
    small = [spec(name, memory=8 * GIB, gpus=1) for name in ("a", "b")]
    return Moment(fleet(nodes, *small, spec("whole", memory=24 * GIB, gpus=1)), 10.0)


def mixed_vendors_and_sizes() -> Moment:
    """One node has GPUs of two vendors and three sizes: only those of the wanted model count."""
    mixed = cards(gpu(0, "NVIDIA L4", 24), gpu(1, "NVIDIA H100", 80), gpu(2, "AMD MI300X", 192))
    wish = spec("m", memory=60 * GIB, gpus=1, constraints=Constraints(gpu_model="h100"))
    return Moment(fleet({"n1": mixed, "n2": cards(gpu(0, "AMD MI300X", 192))}, wish), 10.0)


def gpu_model_and_count() -> Moment:
    """Two H100 are needed in one node: one node has one of them, one has two that are too full, one has none."""
    nodes = {
        "n1": cards(gpu(0, "NVIDIA H100", 80), gpu(1, "NVIDIA L4", 24)),
        "n2": cards(gpu(0, "NVIDIA H100", 80), gpu(1, "NVIDIA H100", 80, foreign=50, holders=(4711,))),
        "n3": inventory(),
    }
    wish = spec("m", memory=70 * GIB, gpus=2, constraints=Constraints(gpu_model="H100"))
    return Moment(fleet(nodes, wish), 10.0)


def foreign_memory() -> Moment:
    """The RAM would do, but somebody else's process holds most of it: its pid is named."""
    held = Device(uuid=CPU, total=16 * GIB, foreign=13 * GIB, holders=(4711, 815))
    return Moment(
        fleet({"n1": inventory(devices=(held,)), "n2": inventory(memory=2 * GIB)}, spec("m", memory=4 * GIB)), 10.0
    )


def closed_nodes() -> Moment:
    """Of four nodes one is cordoned, one drains, one is lost, and the last is too small."""
    state = fleet({name: inventory() for name in ("n1", "n2", "n3")})
    state = cordon(state, "n1", True, 3.0)
    state = drain_node(state, "n2", 600.0, 3.0)
    state = node_lost(state, "n3", "i1", "its lease ran out", 3.0)
    state = fleet({"n4": inventory(memory=2 * GIB)}).model_copy(
        update={"nodes": {**state.nodes, **fleet({"n4": inventory(memory=2 * GIB)}).nodes}}
    )
    return Moment(wanted(state, spec("m", memory=4 * GIB), now=4.0), 10.0)


def engine_missing() -> Moment:
    """A node without the model's engine is none of its candidates."""
    return Moment(fleet({"n1": inventory(engines=VLLM_ONLY), "n2": inventory(engines=())}, spec("m")), 10.0)


def required_label() -> Moment:
    """Only a node with all required labels may have it, however well another fits."""
    nodes = {
        "n1": inventory(labels={"zone": "a", "disk": "ssd"}),
        "n2": inventory(labels={"zone": "a"}),
        "n3": inventory(),
    }
    return Moment(fleet(nodes, spec("m", constraints=Constraints(labels={"zone": "a", "disk": "ssd"}))), 10.0)


def preferred_label() -> Moment:
    """A preferred label draws the model and binds it to nothing."""
    nodes = {"n1": inventory(), "n2": inventory(labels={"zone": "b"})}
    return Moment(fleet(nodes, spec("m", constraints=Constraints(prefer={"zone": "b"}))), 10.0)


def required_role() -> Moment:
    """No node has the role that the model asks for."""
    nodes = {"n1": inventory(roles=("mirror",)), "n2": inventory()}
    return Moment(fleet(nodes, spec("m", constraints=Constraints(role="inference"))), 10.0)


def gang_whole() -> Moment:
    """A replica of three shards takes three nodes at once."""
    nodes = {f"n{number}": inventory(gpus=(80 * GIB,)) for number in range(1, 5)}
    return Moment(fleet(nodes, spec("m", memory=70 * GIB, gpus=1, shards=3)), 10.0)


def gang_none() -> Moment:
    """Only two nodes have room for one of three shards: none of them starts."""
    nodes = {f"n{number}": inventory(gpus=(gib * GIB,)) for number, gib in ((1, 80), (2, 80), (3, 24))}
    return Moment(fleet(nodes, spec("m", memory=70 * GIB, gpus=1, shards=3)), 10.0)


def gang_interconnect() -> Moment:
    """Both shards go to nodes of one fabric, although the best single node stands in another one."""
    nodes = {
        "n1": inventory(gpus=(72 * GIB,), labels={"fabric": "x"}),
        "n2": inventory(gpus=(80 * GIB,), labels={"fabric": "y"}),
        "n3": inventory(gpus=(80 * GIB,), labels={"fabric": "y"}),
    }
    wish = spec("m", memory=70 * GIB, gpus=1, shards=2, constraints=Constraints(interconnect="fabric"))
    return Moment(fleet(nodes, wish), 10.0)


def disk_for_weights() -> Moment:
    """Memory is there; the disk for the weights is not."""
    return Moment(fleet({"n1": inventory(disk=GIB // 2), "n2": inventory(memory=GIB // 2)}, spec("m")), 10.0)


def larger_than_any_node() -> Moment:
    """What no node could hold even if it were empty."""
    nodes = {"n1": inventory(memory=16 * GIB), "n2": inventory(memory=46 * GIB)}
    return Moment(fleet(nodes, spec("huge", memory=80 * GIB)), 10.0)


def important_ones_first() -> Moment:
    """Room for one: the model of higher priority has it, though it came later."""
    return Moment(fleet({"n1": inventory(memory=GIB)}, spec("low", priority=10), spec("high", priority=90)), 10.0)


def waits_and_has_said_so() -> Moment:
    """A model that waits causes no further steps while nothing changes."""
    state = fleet({"n1": inventory(memory=4 * GIB)}, spec("first", memory=4 * GIB), spec("late", memory=2 * GIB))
    return Moment(served(state, 10.0), 20.0)

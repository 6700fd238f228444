"""Which nodes a starting node asks for a model's files, so that many starts at once draw one copy from the mirror."""

import hashlib
from collections.abc import Sequence

from fleet.state import HOLDING, FleetState, NodeState, ReplicaState

FAN = 2
"""Nodes that one node feeds: twenty nodes are five deep, and no line carries more than twice the model."""
MOST = 8
"""Peers named to one start: its way up in the tree, and a few more holders."""


def holders(state: FleetState, weights_id: str) -> list[str]:
    """Nodes that give the files and have them whole: they say so, or run a replica from them."""
    serving = {
        node
        for replica in state.replicas.values()
        if replica.state in HOLDING - {ReplicaState.PLACED, ReplicaState.STARTING}
        and _weights_of(state, replica.model) == weights_id
        for node in replica.nodes
    }
    having = (one.id for one in state.nodes.values() if weights_id in one.inventory.weights or one.id in serving)
    return sorted(one for one in having if address(state, one))


def fetching(state: FleetState, weights_id: str) -> list[str]:
    """Nodes that give the files and on which a replica starts from them, the one that was placed first in front."""
    starting = [
        replica
        for replica in state.replicas.values()
        if replica.state in (ReplicaState.PLACED, ReplicaState.STARTING)
        and _weights_of(state, replica.model) == weights_id
    ]
    starting.sort(key=lambda replica: replica.generation)
    return list(dict.fromkeys(node for replica in starting for node in replica.nodes if address(state, node)))


def upstream(node: str, held: Sequence[str], before: Sequence[str]) -> list[str]:
    """Whom `node` asks, the best first: nodes that have the files, and those that began to fetch them before it.

    The nodes that fetch form a tree beneath the holders, or, where nobody has the files, beneath the first of them,
    which alone goes to the mirror. Each asks only those above itself, so no two wait for each other.
    """
    line = [one for one in before if one != node]
    roots = sorted((one for one in held if one != node and one not in line), key=lambda one: _rank(node, one))
    everyone, count = [*roots, *line], len(roots)
    # The place this node would have, and from there its way up.
    way: list[str] = []
    place = len(everyone)
    while place >= max(1, count):
        place = (place - count) // FAN if count else (place - 1) // FAN
        way.append(everyone[place])
    return [*way, *(one for one in roots if one not in way)][:MOST]


def address(state: FleetState, node: str) -> str:
    """Where a node serves files; empty for one that serves none, or is lost."""
    found = state.nodes.get(node)
    return found.inventory.peer_url if found is not None and found.state is not NodeState.LOST else ""


def _weights_of(state: FleetState, model: str) -> str:
    record = state.models.get(model)
    return record.spec.weights.model_id if record is not None else ""


def _rank(node: str, other: str) -> str:
    """Spreads the nodes over the holders, the same way each time."""
    return hashlib.sha256(f"{node}/{other}".encode()).hexdigest()

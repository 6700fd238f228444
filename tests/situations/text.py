"""A situation as a person reads it: what it is about, the fleet, the plan with every node's answer, what follows."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

from fleet.commits import commit
from fleet.forecast import passes
from fleet.plan_text import explained_lines, plan_lines
from fleet.planning import next_pass, plan
from fleet.render import size
from fleet.state import CPU, Device, FleetState, ModelRecord, NodeRecord, NodeState, ReplicaRecord, ReplicaState
from tests.situations import counting, making_room, placing, replacing, troubles
from tests.situations.fleets import Moment

Situation = Callable[[], Moment]

MODULES: tuple[ModuleType, ...] = (placing, counting, making_room, troubles, replacing)


def situations() -> dict[str, Situation]:
    """All of them by name: each public function that a module of situations defines and that takes nothing."""
    return {
        name: found
        for module in MODULES
        for name, found in inspect.getmembers(module, inspect.isfunction)
        if found.__module__ == module.__name__ and inspect.signature(found).return_annotation is Moment
    }


def golden(name: str, situation: Situation) -> str:
    """The text of a situation's golden file."""
    state, now = situation()
    lines = [name.replace("_", " "), inspect.getdoc(situation) or "", "", f"fleet at {now:g} s"]
    lines += [f"  {line}" for line in _fleet(state, now)]
    decided = plan(state, now)
    lines += ["", "plan"]
    lines += [f"  {line}" for line in explained_lines(decided, state) or ["nothing to do"]]
    for number, one in enumerate(passes(state, now)[1:]):
        lines += ["", "then, when that has gone well" if number == 0 else "then"]
        lines += [f"  {line}" for line in plan_lines(one.plan, one.state)]
    deadline = next_pass(commit(state, decided, now), now)
    lines += ["", "looked at again " + (f"at {deadline:.1f} s" if deadline is not None else "when something changes")]
    return "\n".join(lines) + "\n"


def _fleet(state: FleetState, now: float) -> Iterator[str]:
    if state.brake:
        yield f"brake: {state.brake}"
    for node in sorted(state.nodes.values(), key=lambda node: node.id):
        yield _node(node)
    for model in sorted(state.models.values(), key=lambda model: model.spec.id):
        yield from _model(model)
        for replica in sorted(state.replicas.values(), key=lambda replica: replica.id):
            if replica.model == model.spec.id:
                yield f"  {_replica(replica)}"


def _node(node: NodeRecord) -> str:
    found = node.inventory
    said = [f"node {node.id} {node.state}", *(_device(device) for device in found.devices)]
    said.append(f"disk {size(found.disk_free)} free")
    said.append("engines " + (", ".join(offer.engine for offer in found.engines) or "none"))
    if found.weights:
        said.append(f"weights {', '.join(found.weights)}")
    said += [f"{key}={value}" for key, value in sorted(found.labels.items())]
    said += [f"role {role}" for role in found.roles]
    if node.state is NodeState.DRAINING:
        said.append(f"until {node.drain_until:g} s")
    return ", ".join(said)


def _device(device: Device) -> str:
    name = "RAM" if device.uuid == CPU else f"{device.uuid} {device.model}"
    pids = f" by pid {', '.join(map(str, device.holders))}" if device.holders else ""
    return f"{name} {size(device.total)}" + (f" ({size(device.foreign)} held{pids})" if device.foreign else "")


def _model(model: ModelRecord) -> Iterator[str]:
    spec = model.spec
    where = f"on each of {spec.need.gpus} GPUs" if spec.need.gpus > 1 else "on a GPU" if spec.need.gpus else "of RAM"
    said = [f"model {spec.name} version {model.spec_version}"]
    said.append(f"{spec.shards} shards of {size(spec.need.memory)} {where}" if spec.shards > 1 else "")
    said.append(f"{size(spec.need.memory)} {where}" if spec.shards == 1 else "")
    said.append(f"weights {size(spec.need.disk)}")
    said.append(f"priority {spec.priority}")
    if spec.scaling is not None:
        count = model.scaled if model.scaled is not None else spec.replicas
        said.append(f"{count} of {spec.scaling.min} to {spec.scaling.max} replicas by demand")
        said.append(f"last used at {model.used_at:g} s" if model.used_at else "")
        said.append(f"last scaled at {model.scaled_at:g} s" if model.scaled_at else "")
    else:
        said.append(f"wanted {spec.replicas}")
    wishes = spec.constraints.model_dump(exclude_defaults=True)
    said += [f"{key} {_wish(value)}" for key, value in wishes.items()]
    rollout = spec.rollout.model_dump(exclude_defaults=True)
    said += [f"{key} {value}" for key, value in rollout.items()]
    said.append("is removed" if model.removing else "")
    yield ", ".join(part for part in said if part)
    if model.waiting:
        yield f"  waits: {model.waiting}"


def _wish(value: object) -> str:
    return ", ".join(f"{key}={wish}" for key, wish in value.items()) if isinstance(value, dict) else str(value)


def _replica(replica: ReplicaRecord) -> str:
    where = f" on {', '.join(replica.nodes)}" if replica.nodes else ""
    said = [f"{replica.id} version {replica.spec_version} generation {replica.generation}: {replica.state}{where}"]
    said.append(f"since {replica.since:g} s")
    if replica.in_flight:
        said.append(f"{replica.in_flight} in flight")
    if replica.state is ReplicaState.FAILED and replica.failure is not None:
        line = f"{replica.failure.reason}: {replica.failure.told(replica=replica.id)}"
        said.append(f"given up: {line}" if replica.given_up else line)
    return ", ".join(said)

"""Fleets to measure on, as values: the same arguments give the same fleet."""

import random
from typing import NamedTuple

from fleet.spec import Engine, Format, ModelFile, ModelSpec, ShardNeed, Weights
from fleet.state import CPU, Device, EngineOffer, FleetState, Inventory, ModelRecord, NodeRecord, NodeState

GIB = 1024**3

GPU_SIZES = (24, 48, 80, 80, 141)
"""GiB of one GPU: what is common in machines for inference; half of them 80 GiB or more."""

GPU_SHAPES = (1, 1, 1, 2, 2, 4)
"""GPUs of one shard: most models run on one."""


class Packing(NamedTuple):
    """What was placed."""

    memory: int
    """GiB on all devices."""
    replicas: int
    proven: bool = False
    """Whether it is known that there is no better one."""


def node(name: str, gpus: int, gpu_gib: int, ram_gib: int) -> NodeRecord:
    """A ready node with RAM and equal GPUs."""
    devices = [Device(uuid=CPU, total=ram_gib * GIB)]
    devices += [
        Device(uuid=f"GPU-{name}-{number}", model=f"gpu-{gpu_gib}", total=gpu_gib * GIB) for number in range(gpus)
    ]
    inventory = Inventory(
        address="127.0.0.1",
        devices=tuple(devices),
        engines=tuple(EngineOffer(engine=engine, version="1", installed=True) for engine in Engine),
        disk_total=8192 * GIB,
        disk_free=8192 * GIB,
    )
    return NodeRecord(id=name, state=NodeState.READY, incarnation="i1", inventory=inventory, since=1.0, version=1)


def model(
    name: str,
    *,
    memory: int,
    gpus: int,
    replicas: int,
    applied_at: float = 2.0,
    priority: int = 50,
    shards: int = 1,
) -> ModelRecord:
    """A model of the catalog; `memory` is bytes on each device of a shard."""
    weights = Weights(
        model_id=f"{name}-abc",
        format=Format.GGUF,
        entry="model.gguf",
        files=(ModelFile(path="model.gguf", size=GIB, sha256="00"),),
        mirror=f"file:///mirror/{name}-abc",
    )
    spec = ModelSpec(
        name=name,
        repo=f"file:/models/{name}.gguf",
        engine=Engine.LLAMACPP if gpus == 0 else Engine.VLLM,
        weights=weights,
        need=ShardNeed(memory=memory, gpus=gpus, disk=GIB),
        replicas=replicas,
        priority=priority,
        shards=shards,
        context_length=2048,
    )
    return ModelRecord(spec=spec, spec_version=1, applied_at=applied_at, version=1)


def fleet(nodes: list[NodeRecord], models: list[ModelRecord]) -> FleetState:
    """A state with these and nothing placed."""
    return FleetState(
        nodes={one.id: one for one in nodes},
        models={one.spec.id: one for one in models},
    )


def empty_nodes(count: int, gpus: int) -> list[NodeRecord]:
    """Nodes of mixed sizes, all with the same number of GPUs."""
    chance = random.Random(count)  # noqa: S311 - the same nodes every time
    return [
        node(f"n{number:04}", gpus, chance.choice(GPU_SIZES), chance.choice((256, 512, 1024)))
        for number in range(count)
    ]


def mixed_models(replicas: int, models: int) -> list[ModelRecord]:
    """Models for GPUs and, each fourth, for CPUs; `replicas` in all."""
    chance = random.Random(replicas)  # noqa: S311 - the same models every time
    made: list[ModelRecord] = []
    for number in range(models):
        gpus = 0 if number % 4 == 3 else chance.choice(GPU_SHAPES)
        memory = chance.randint(4, 40) * GIB
        share = replicas // models + (number < replicas % models)
        made.append(model(f"m{number:04}", memory=memory, gpus=gpus, replicas=share, applied_at=2.0 + number))
    return made

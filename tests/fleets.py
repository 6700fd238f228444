"""Small fleets as values, for tests."""

from fleet.facts import node_joined
from fleet.spec import Engine, Format, ModelFile, ModelSpec, ShardNeed, Weights
from fleet.state import CPU, Device, EngineOffer, FleetState, Inventory
from fleet.wishes import apply

GIB = 1024**3


def weights(name: str = "m", size: int = GIB) -> Weights:
    return Weights(
        model_id=f"{name}-abc",
        format=Format.GGUF,
        entry="model.gguf",
        files=(ModelFile(path="model.gguf", size=size, sha256="00"),),
        mirror=f"file:///mirror/{name}-abc",
    )


def spec(
    name: str = "m",
    *,
    memory: int = GIB,
    gpus: int = 0,
    replicas: int = 1,
    priority: int = 50,
    context: int = 2048,
    disk: int = GIB,
    **more: object,
) -> ModelSpec:
    fields: dict[str, object] = dict(
        name=name,
        repo=f"file:/models/{name}.gguf",
        engine=Engine.LLAMACPP,
        weights=weights(name if disk == GIB else f"{name}-{disk // GIB}", disk),
        need=ShardNeed(memory=memory, gpus=gpus, disk=disk),
        replicas=replicas,
        priority=priority,
        context_length=context,
        **more,
    )
    return ModelSpec.model_validate(fields)


def inventory(
    *, memory: int = 16 * GIB, gpus: tuple[int, ...] = (), disk: int = 100 * GIB, **more: object
) -> Inventory:
    devices = [Device(uuid=CPU, total=memory)]
    devices += [Device(uuid=f"GPU-{number}", model="H100", total=total) for number, total in enumerate(gpus)]
    fields: dict[str, object] = {
        "address": "127.0.0.1",
        "devices": tuple(devices),
        "engines": (EngineOffer(engine=Engine.LLAMACPP, version="1", installed=True),),
        "disk_total": disk,
        "disk_free": disk,
        **more,
    }
    return Inventory.model_validate(fields)


def fleet(nodes: dict[str, Inventory], *specs: ModelSpec) -> FleetState:
    state = FleetState()
    for name, found in nodes.items():
        state = node_joined(state, name, "i1", found, now=1.0)
    for wanted in specs:
        state, _ = apply(state, wanted, now=2.0)
    return state

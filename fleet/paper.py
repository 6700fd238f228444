"""Machines that exist on paper only, as a person writes them: `2x80GiB,1x24GiB`."""

import re
from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field, TypeAdapter, ValidationError

from fleet.records import Typed
from fleet.spec import Engine, ModelRequest, Size
from fleet.state import CPU, Device, EngineOffer, FleetState, Inventory, NodeRecord, NodeState

_GROUP = re.compile(r"(\d{1,2})\s*[x×]\s*(\S+)")
MAX_GPUS = 64
MIN_MEMORY = 1024**2
"""Bytes: a GPU of `80` means one of 80 GiB, and the unit is missing."""
EXAMPLE = "2x80GiB, or 1x24GiB,2x80GiB"
RAM = 1 << 60
"""Bytes of RAM and disk of a machine of which only the GPUs are told: as much as needed."""

_SIZE: TypeAdapter[ByteSize] = TypeAdapter(Size)


def read_gpus(text: str) -> tuple[int, ...]:
    """The memory of each GPU in bytes, as written. Raises ValueError with one sentence."""
    found: list[int] = []
    for part in text.split(","):
        group = _GROUP.fullmatch(part.strip())
        if group is None or not int(group[1]):
            raise ValueError(f"{part.strip()[:40]!r} is not a number of GPUs and their memory: write {EXAMPLE}")
        try:
            memory = int(_SIZE.validate_python(group[2]))
        except ValidationError as error:
            raise ValueError(f"{group[2][:40]!r} is not a size such as 80GiB: write {EXAMPLE}") from error
        if memory < MIN_MEMORY:
            raise ValueError(f"{group[2][:40]!r} is less than 1 MiB: name the unit, as in {EXAMPLE}")
        found += [memory] * int(group[1])
    if len(found) > MAX_GPUS:
        raise ValueError(f"{len(found)} GPUs are more than the {MAX_GPUS} that one replica can have on a node")
    return tuple(found)


def _gpus(text: str) -> str:
    if text:
        read_gpus(text)
    return text


class Paper(Typed):
    """What stands on the paper: `nodes` equal machines."""

    gpus: Annotated[str, Field(max_length=200), AfterValidator(_gpus)] = ""
    """Of each machine, such as `2x80GiB`; "": none."""
    ram: Size | None = None
    """Of each machine; not told: as much as needed where it has GPUs."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1


class CheckWish(ModelRequest):
    """The input of a `ModelCheck`: a model as it would be served, and on what."""

    cell: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")] = "main"
    """The fleet it is asked of."""
    paper: Paper | None = None
    """Machines on paper instead of that fleet."""


def fleet_of(paper: Paper) -> FleetState:
    """A fleet of empty machines as the paper says, which offer every engine."""
    gpus = (
        tuple(
            Device(uuid=f"gpu{index}", model="paper", total=memory)
            for index, memory in enumerate(read_gpus(paper.gpus))
        )
        if paper.gpus
        else ()
    )
    ram = int(paper.ram) if paper.ram is not None else RAM if gpus else 0
    inventory = Inventory(
        address="",
        devices=(Device(uuid=CPU, total=ram), *gpus) if ram else gpus,
        engines=tuple(EngineOffer(engine=engine, version="", installed=False) for engine in Engine),
        disk_total=RAM,
        disk_free=RAM,
    )
    names = [f"paper{number}" if paper.nodes > 1 else "paper" for number in range(1, paper.nodes + 1)]
    nodes = {
        name: NodeRecord(id=name, state=NodeState.READY, incarnation="", inventory=inventory, since=0.0)
        for name in names
    }
    return FleetState(nodes=nodes)

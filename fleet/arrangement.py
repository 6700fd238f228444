"""In which order replicas of one priority are placed where not all of them fit: several are tried, the fullest wins.

Only the order differs, and whether copies of a model are spread: each placement is chosen and explained as always.
On a small fleet one replica left out is seen, and another order often finds its place. A large fleet has gaps of every
size, so that the first order is as good; the search is bounded by questions to nodes, and leaves large fleets alone.
"""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fleet.placement import SCORE_WEIGHTS, Candidates, Standings, Weights
from fleet.room import Room
from fleet.spec import ModelSpec
from fleet.state import ModelRecord
from fleet.steps import StepKind

TIGHT: Weights = MappingProxyType({**SCORE_WEIGHTS, "spread": 0.0})
"""Where spreading the copies of a model would leave another without a place."""

MOST_TRIALS = 72
"""More orders than that find nothing: measured on random fleets of 5 to 12 nodes, see bench/README.md."""

MOST_QUESTIONS = 60_000
"""Orders x replicas x nodes: about a third of a second in all."""

REPAIRS = 6
"""Times that whoever was left out by an order moves to its front."""


class Want(NamedTuple):
    """One replica that is to be placed."""

    kind: StepKind
    model: ModelRecord
    replica: str
    reason: str


class Arrangement(NamedTuple):
    """An order in which more is placed."""

    wants: tuple[Want, ...]
    """Those that get a place, the first first."""
    weights: Weights
    complete: bool
    """Whether everything that is wanted gets a place."""


class Trial(NamedTuple):
    """What one order comes to."""

    placed: tuple[str, ...]
    """Model ids, a place each, in their order."""
    left: tuple[str, ...]
    memory: int
    """Bytes placed, on all devices."""

    @property
    def value(self) -> tuple[int, int]:
        """The most memory, then the most replicas."""
        return self.memory, len(self.placed)


def _size(spec: ModelSpec) -> int:
    return spec.need.memory * max(1, spec.need.gpus) * spec.shards


Rank = Callable[[ModelSpec], tuple[int, ...]]

ORDERS: tuple[Rank, ...] = (
    lambda spec: (0,),  # as the pass has them: the most devices at once, then the most memory on each
    lambda spec: (-_size(spec),),
    lambda spec: (-spec.shards, -spec.need.gpus, -spec.need.memory),
    lambda spec: (-spec.need.memory, -spec.need.gpus),
    lambda spec: (-_size(spec) * spec.replicas,),
)


def arranged(room: Room, standings: Standings, wants: Sequence[Want]) -> Arrangement | None:
    """The fullest order that was found; None where the given one is as good. `room` is left as it is."""
    trials = min(MOST_TRIALS, MOST_QUESTIONS // max(1, len(wants) * len(room.nodes)))
    specs = {want.model.spec.id: want.model.spec for want in wants}
    names = [want.model.spec.id for want in wants]
    if trials < 2 or len(specs) < 2:
        return None
    first = best = _tried(room, standings, specs, names, SCORE_WEIGHTS)
    if not first.left or not first.placed:
        return None
    weights = SCORE_WEIGHTS
    for tried, order in _orders(room, standings, specs, names, trials - 1):
        if tried.value > best.value:
            best, weights = tried, order
        if not tried.left:
            break
    if best is first:
        return None
    queues = {name: iter([want for want in wants if want.model.spec.id == name]) for name in specs}
    return Arrangement(tuple(next(queues[name]) for name in best.placed), weights, complete=not best.left)


def _orders(
    room: Room, standings: Standings, specs: dict[str, ModelSpec], names: list[str], trials: int
) -> Iterable[tuple[Trial, Weights]]:
    """Trials with their weights: spread copies first, as that is better where it is no less full."""
    for weights in (SCORE_WEIGHTS, TIGHT):
        for rank in ORDERS:
            order = sorted(names, key=lambda name: rank(specs[name]))
            for _ in range(REPAIRS):
                if trials <= 0:
                    return
                trials -= 1
                tried = _tried(room, standings, specs, order, weights)
                yield tried, weights
                again = [*tried.left, *tried.placed]
                if again == order:
                    break
                order = again


def _tried(room: Room, standings: Standings, specs: dict[str, ModelSpec], order: list[str], weights: Weights) -> Trial:
    sheet = room.copy()
    asked: dict[str, Candidates] = {}
    full: set[str] = set()
    placed: list[str] = []
    left: list[str] = []
    memory = 0
    for name in order:
        if name not in full:
            if name not in asked:
                asked[name] = Candidates(specs[name], sheet, standings, weights)
            shards = asked[name].shards()
            if shards:
                sheet.take(name, shards)
                placed.append(name)
                memory += _size(specs[name])
                continue
            full.add(name)  # room only shrinks: the next one of it would get the same answer
        left.append(name)
    return Trial(tuple(placed), tuple(left), memory)

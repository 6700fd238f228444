"""The memory that earlier runs really took: measured by nodes, kept by the fleet, believed before any estimate."""

import hashlib
from collections.abc import Iterable

from fleet.records import Record
from fleet.spec import Engine

KEPT = 200
"""Runs that are remembered, the latest last: an entry has some 300 bytes, and the state travels as one payload."""


class Run(Record):
    """What a run's memory depends on: the same again takes the same."""

    weights: str
    """`Weights.model_id`."""
    engine: Engine
    context_length: int
    concurrency: int
    gpus: int = 0
    args: str = ""
    """A digest of the extra arguments, `digest_of`; empty: none."""
    nodes: int = 1
    """That its replica spanned: a shard of several takes its part only."""
    stages: int = 1
    """Its layers were divided over."""
    device: str = ""
    """The model of its GPUs; "cpu" for RAM."""


class Measured(Record):
    """The most one run took on any of its devices, in bytes."""

    run: Run
    peak: int
    at: float = 0.0
    """When the fleet was told."""


def digest_of(args: Iterable[str]) -> str:
    """What stands for a run's extra arguments: they may be long, and hold what need not be kept twice."""
    joined = "\0".join(args)
    return hashlib.sha256(joined.encode(errors="surrogateescape")).hexdigest()[:12] if joined else ""


def with_peak(known: tuple[Measured, ...], told: Measured, now: float) -> tuple[Measured, ...]:
    """What is known once a node told of a run: the higher of two peaks of the same, the oldest beyond `KEPT` gone."""
    if told.peak <= 0:
        return known
    before = max((one.peak for one in known if one.run == told.run), default=0)
    if told.peak <= before:
        return known
    others = tuple(one for one in known if one.run != told.run)
    return (*others, Measured(run=told.run, peak=told.peak, at=now))[-KEPT:]


def peak_of(known: Iterable[Measured], run: Run, devices: Iterable[str]) -> int:
    """The highest peak of such a run on any of these kinds of devices; 0 where none has run."""
    runs = [run.model_copy(update={"device": device}) for device in devices]
    return max((one.peak for one in known if one.run in runs), default=0)


def believed(engine: Engine, estimated: int, peak: int) -> int:
    """Bytes to reserve, from an estimate and an earlier run's peak (0: none).

    llama.cpp takes its whole cache at its start: what it took is what it needs, and a twentieth more, as short prompts
    do not use its whole compute buffer. vLLM and SGLang fill what they are
    given as requests come: a lower peak only shows that nobody has asked for the whole cache yet, and the next run
    would get less of it.
    """
    if not peak:
        return estimated
    return peak + peak // 20 if engine is Engine.LLAMACPP else max(estimated, peak)

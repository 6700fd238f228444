"""What a person reads: sizes, times, the sentence of a decision, a job's table. Text is made here and only here."""

from collections.abc import Iterable
from typing import Protocol

from fleet.reasons import Reason
from fleet.state import EngineOffer, ForcedEnd, Outcome, ShardAssignment, Verdict

COUNTED = frozenset({Reason.GPU_COUNT, Reason.GANG_INCOMPLETE})
"""Reasons whose need and free are numbers of things, not bytes."""


def size(count: int) -> str:
    """Bytes as a person reads them: `0 B`, `512 B`, `93.8 MiB`, `46 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    text = f"{value:.0f}" if unit == "B" or value >= 100 or value == int(value) else f"{value:.1f}"
    return f"{text} {unit}"


def duration(seconds: float) -> str:
    """`12 ms`, `1.4 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def speed(tokens_per_second: float) -> str:
    """`0.435 tokens/s`, `1234 tokens/s`: three digits, or all before the point."""
    digits = f"{tokens_per_second:.3g}" if tokens_per_second < 999.5 else f"{tokens_per_second:.0f}"
    return f"{digits} tokens/s"


def forced_sentence(forced: ForcedEnd) -> str:
    """`m-0 on n1 was ended with 3 requests in flight: the deadline of its drain came first`."""
    where = ", ".join(forced.nodes)
    return (
        f"{forced.replica} on {where} was ended with {requests(forced.requests)} in flight: "
        f"the deadline of its drain came first"
    )


def port_taken(port: int, node: str, pid: int, name: str) -> str:
    """`port 29500 is taken on n2 by pid 123 (python3)`; `pid` 0: by whom cannot be seen."""
    holder = f"pid {pid} ({name})" if pid else "another process"
    return f"port {port} is taken on {node} by {holder}"


def requests(count: int) -> str:
    """`1 request`, `3 requests`."""
    return f"{count} request{'s' if count != 1 else ''}"


def offer_text(offer: EngineOffer) -> str:
    """`llamacpp 1.2`, and whether the first start has to install it."""
    return f"{offer.engine} {offer.version}".strip() + ("" if offer.installed else " (not installed yet)")


def decision_sentence(model: str, shards: tuple[ShardAssignment, ...], verdicts: tuple[Verdict, ...]) -> str:
    """One sentence for one placement.

    "qwen-7b goes to n2 (best of 3 that fit)", or
    "0/6 nodes fit qwen-72b: 3 gpu_memory (need 80 GiB, best free 46 GiB on n4), 2 engine_missing, 1 node_cordoned".
    """
    if shards:
        fitting = sum(verdict.outcome is Outcome.FITS for verdict in verdicts)
        where = ", ".join(shard.node for shard in shards)
        return f"{model} goes to {where} (best of {fitting} that fit)" if fitting > 1 else f"{model} goes to {where}"
    if not verdicts:
        return f"0/0 nodes fit {model}: no node has joined the fleet"
    by_reason: dict[Reason, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.reason is not None:
            by_reason.setdefault(verdict.reason, []).append(verdict)
    groups = sorted(by_reason.items(), key=lambda group: (-len(group[1]), group[0]))
    return f"0/{len(verdicts)} nodes fit {model}: " + ", ".join(_group(reason, group) for reason, group in groups)


def _group(reason: Reason, group: list[Verdict]) -> str:
    text = f"{len(group)} {reason}"
    if group[0].outcome is not Outcome.REFUSED:
        return text
    best = max(group, key=lambda verdict: verdict.free)
    if reason is Reason.GANG_INCOMPLETE:
        return f"{text} (all {best.need} shards or none, only {best.free} fit together)"
    show = str if reason in COUNTED else size
    holder = f", of which pid {best.holder} and others hold {size(best.foreign)}" if best.holder else ""
    return f"{text} (need {show(best.need)}, best free {show(best.free)} on {best.node}{holder})"


class Row(Protocol):
    """A row of a job's table, such as `activities.contract.StepStatus`. Times are seconds since the epoch."""

    @property
    def name(self) -> str:
        """The step."""

    @property
    def state(self) -> str:
        """How far it is."""

    @property
    def detail(self) -> str:
        """What it found."""

    @property
    def started_at(self) -> float:
        """0 while it has not begun."""

    @property
    def ended_at(self) -> float:
        """0 while it has not ended."""


def steps_table(title: str, rows: Iterable[Row]) -> str:
    """A job's steps as a Markdown table, for the web UI's current details."""
    lines = [f"**{markdown(title)}**", "", "| step | state | took | detail |", "| --- | --- | --- | --- |"]
    for row in rows:
        # No-break spaces: the web UI's narrow columns would part the number from its unit.
        took = duration(row.ended_at - row.started_at).replace(" ", "\u00a0") if row.ended_at else ""
        lines.append(f"| {row.name} | {row.state} | {took} | {markdown(row.detail)} |")
    return "\n".join(lines)


def markdown(text: str) -> str:
    """Text that cannot break out of a table's cell: what it says may come from a model's repo."""
    flat = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>|#" else char for char in flat)

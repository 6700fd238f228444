"""Every number llmgw measures: its name, unit, labels and meaning, in one place.

Names and units follow OpenTelemetry's semantic conventions where there are some. A label's values are bounded: states,
reasons, steps, and the models of the catalog.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a number is."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


class Metric(NamedTuple):
    """One number."""

    name: str
    kind: Kind
    unit: str
    """As UCUM writes it: `s`, `By`, or what is counted in braces."""
    process: str
    """Who measures it."""
    labels: tuple[str, ...]
    meaning: str

    @property
    def scraped(self) -> tuple[str, ...]:
        """The names on the Prometheus page."""
        base = self.name.replace(".", "_")
        unit = {"s": "seconds", "By": "bytes"}.get(self.unit, "")
        base = f"{base}_{unit}" if unit else base
        match self.kind:
            case Kind.COUNTER:
                return (f"{base}_total",)
            case Kind.HISTOGRAM:
                return (f"{base}_bucket", f"{base}_count", f"{base}_sum")
        return (base,)


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600)
"""Bounds of histograms of time: from one hop through Temporal to the load of a very large model."""
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
"""Bounds of histograms of tokens, as the semantic conventions for generative AI give them."""

OTHER = "_OTHER"
"""A label's value for what is not known: a client may ask for any name."""

JOBS = Metric(
    "llmgw.jobs", Kind.COUNTER, "{job}", "worker", ("llmgw.kind", "llmgw.state", "error.type"), "jobs that ended"
)
JOB_STEP = Metric(
    "llmgw.job.step.duration",
    Kind.HISTOGRAM,
    "s",
    "worker",
    ("llmgw.step", "llmgw.state", "error.type"),
    "a step of a job, from `registry` to `smoke test`",
)
PASSES = Metric(
    "llmgw.pass.duration",
    Kind.HISTOGRAM,
    "s",
    "worker",
    ("llmgw.outcome",),
    "deciding a pass: `quiet`, `acted`, or `moved` where the fleet moved under every plan",
)
PASS_STEPS = Metric(
    "llmgw.pass.steps", Kind.COUNTER, "{step}", "worker", ("llmgw.step",), "steps of committed passes, by kind"
)
REFUSALS = Metric(
    "llmgw.placement.refusals",
    Kind.COUNTER,
    "{node}",
    "worker",
    ("llmgw.reason",),
    "nodes that turned down a replica which then fitted nowhere",
)
RESTARTS = Metric(
    "llmgw.restarts", Kind.COUNTER, "{replica}", "worker", ("llmgw.model", "llmgw.reason"), "replicas started again"
)
REPLICAS = Metric(
    "llmgw.replicas",
    Kind.GAUGE,
    "{replica}",
    "worker",
    ("llmgw.model.id", "llmgw.model", "llmgw.state"),
    "replicas as Fleet has them",
)
WANTED = Metric(
    "llmgw.replicas.wanted",
    Kind.GAUGE,
    "{replica}",
    "worker",
    ("llmgw.model.id", "llmgw.model"),
    "what the operator said, or demand made of it",
)
NODES = Metric("llmgw.nodes", Kind.GAUGE, "{node}", "worker", ("llmgw.state",), "nodes as Fleet has them")
BRAKE = Metric("llmgw.brake", Kind.GAUGE, "1", "worker", (), "1 while lost nodes are not reaped")
FORCED = Metric(
    "llmgw.drain.cut",
    Kind.COUNTER,
    "{request}",
    "agent",
    ("llmgw.model",),
    "requests that the deadline of a drain cut off",
)
DRAINS = Metric(
    "llmgw.drains", Kind.COUNTER, "{drain}", "agent", ("llmgw.model", "llmgw.outcome"), "drains: `clean` or `forced`"
)
ACTIVITIES = Metric(
    "llmgw.activity.duration",
    Kind.HISTOGRAM,
    "s",
    "worker, agent",
    ("llmgw.activity", "error.type"),
    "an attempt of an activity; `error.type` is its reason where it failed or refused",
)
NODE_STEP = Metric(
    "llmgw.node.step.duration",
    Kind.HISTOGRAM,
    "s",
    "agent",
    ("llmgw.step", "error.type"),
    "a step on a node: `install engine`, `fetch weights`, `launch engine`, `wait for engine`, …",
)
STARTS = Metric(
    "llmgw.starts", Kind.COUNTER, "{start}", "agent", ("llmgw.model", "llmgw.engine", "error.type"), "starts of shards"
)
FETCHED = Metric(
    "llmgw.fetched",
    Kind.COUNTER,
    "By",
    "agent",
    ("llmgw.weights.outcome",),
    "bytes of weights, by where they came from: `local`, `peer`, `mirror`, `hub`",
)
HTTP_REQUESTS = Metric(
    "http.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "gateway",
    ("http.request.method", "http.route", "http.response.status_code", "error.type"),
    "a client's request, from its first byte to the last of the answer",
)
GEN_AI_REQUESTS = Metric(
    "gen_ai.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "gateway",
    ("gen_ai.operation.name", "gen_ai.request.model", "error.type"),
    "the same, by model",
)
FIRST_BYTE = Metric(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    "gateway",
    ("gen_ai.operation.name", "gen_ai.request.model"),
    "to the first byte of a streamed answer's body",
)
TOKEN_USAGE = Metric(
    "gen_ai.client.token.usage",
    Kind.HISTOGRAM,
    "{token}",
    "gateway",
    ("gen_ai.operation.name", "gen_ai.request.model", "gen_ai.token.type"),
    "tokens of answers that state their usage; a stream does where the client asks for it",
)
HELD = Metric("llmgw.gateway.held", Kind.GAUGE, "{request}", "gateway", (), "requests that wait for a model to start")

METRICS = (
    JOBS,
    JOB_STEP,
    PASSES,
    PASS_STEPS,
    REFUSALS,
    RESTARTS,
    REPLICAS,
    WANTED,
    NODES,
    BRAKE,
    ACTIVITIES,
    STARTS,
    NODE_STEP,
    FETCHED,
    DRAINS,
    FORCED,
    HTTP_REQUESTS,
    GEN_AI_REQUESTS,
    FIRST_BYTE,
    TOKEN_USAGE,
    HELD,
)
"""All of them; beside them each process shows what Temporal's SDK measures, as `temporal_…`."""

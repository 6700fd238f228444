"""What an operator asks for: the model's spec, and the weights it resolves to."""

import hashlib
import re
import unicodedata
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from fleet.records import Record, Typed


def _no_control(text: str) -> str:
    if any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for char in text) or text != text.strip():
        raise ValueError("a name has no line breaks, control characters or spaces at its ends")
    return text


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _readable_size(value: object, read: ValidatorFunctionWrapHandler) -> object:
    try:
        return read(_no_bool(value))
    except ValidationError as error:
        raise ValueError("a size is more than 0, in bytes or with a unit such as 12GiB") from error


ModelName = Annotated[str, Field(min_length=1, max_length=250), AfterValidator(_no_control)]
"""A model's name for people: one line of 1 to 250 characters. `safe_id` makes the name for machines."""

NotBool = BeforeValidator(_no_bool)

Size = Annotated[ByteSize, Field(gt=0), WrapValidator(_readable_size)]
"""Bytes, or text such as `12GiB`."""

Argument = Annotated[str, Field(min_length=1, max_length=4096)]
"""One argument of an engine: no flag of any engine is a tenth as long, and the kernel takes 128 KiB at most."""

Arguments = Annotated[tuple[Argument, ...], Field(max_length=128)]
"""All of them: at most 512 KiB, a quarter of what a job's input may hold."""

SAFE_ID_CHARS = 40  # room for "-<hash>", a replica's ordinal and a prefix within one 63-character label


class Engine(StrEnum):
    """The engines llmgw can start."""

    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    SGLANG = "sglang"


SPANNING = frozenset({Engine.VLLM, Engine.SGLANG})
"""Those that can spread one copy of a model over several nodes."""


class Task(StrEnum):
    """What a model is asked for."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


class Format(StrEnum):
    """How a model's weights are stored."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@lru_cache(maxsize=8192)  # a pass asks for each model's id again and again
def safe_id(name: str) -> str:
    """A name for ids, files and queues: `[a-z0-9-]`, at most 49 characters, different for different names.

    A name that is safe already, and has at most 40 characters, is its own id; any other gets eight hex digits of its
    SHA-256 appended.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:SAFE_ID_CHARS].strip("-")
    if slug == name:
        return slug
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{slug}-{digest}" if slug else f"m-{digest}"


def spread_fault(engine: Engine | None, nodes: int, gpus: int, stages: int) -> str:
    """Why a model cannot be spread over so many nodes and stages, in a sentence; empty where it can."""
    if engine is not None and engine not in SPANNING and (nodes > 1 or stages > 1):
        able = " and ".join(sorted(SPANNING))
        what = f"nodes: {nodes}" if nodes > 1 else f"pipeline_parallel: {stages}"
        return f"{what}: {engine} runs on one node, and {able} on several: leave it out, or name one of them"
    devices = nodes * max(1, gpus)
    if devices % stages:
        count = f"{devices} device{'s' if devices != 1 else ''} (nodes times GPUs)"
        return f"pipeline_parallel: {stages} stages cannot share {count} equally"
    return ""


class ModelFile(Record):
    """One file of a model."""

    path: str
    """Relative to the model's directory, with forward slashes, never absolute and never with `..`."""
    size: int
    """Bytes."""
    sha256: str = ""
    """Hex, or empty while unknown (a source that does not publish it); filled in by the mirror."""
    blake3: str = ""
    """Hex, of the same bytes; made when they were verified by SHA-256. Where it is known it is verified alone, for it
    takes a third of the time."""
    url: str = ""
    """Where the source serves it: `file:/…` or `https://…`; empty for what came from the mirror."""


class ResolvedModel(Record):
    """A repo resolved to exact bytes: the revision and the file list. Sizes are bytes."""

    repo: str
    """The reference as it was resolved, without the revision: `hf:org/name`, `file:/path`, `https://…`."""
    revision: str
    """A commit for `hf:`; for others, 12 hex digits over paths, sizes and hashes or validators."""
    format: Format
    entry: str
    """The file an engine is pointed at (the GGUF, or its first shard); empty where it is the directory."""
    files: tuple[ModelFile, ...]
    note: str = ""
    """What a person should know of how it was resolved, such as that the hub was away."""
    peers: tuple[str, ...] = ()
    """Where nodes serve these files by their hashes: the hub was away, and neither has the mirror them."""

    @property
    def size(self) -> int:
        """All files together, in bytes."""
        return sum(file.size for file in self.files)


class Weights(Record):
    """A model's weights as the nodes fetch them: a resolved model with every hash known, and its mirror."""

    model_id: str
    """`safe_id` of the repo with its revision: the name of the directory that holds it."""
    format: Format
    entry: str
    files: tuple[ModelFile, ...]
    mirror: str
    """URL of the directory that holds the files: `file:/…/<model_id>`, `s3://…/<model_id>` and so on."""
    hub: str = ""
    """URL on a hub beneath which the files are too, at exactly this revision; empty where no hub has them."""

    @property
    def size(self) -> int:
        """All files together, in bytes."""
        return sum(file.size for file in self.files)


class ShardNeed(Record):
    """What one shard needs on its node."""

    memory: int
    """Bytes, on every GPU it uses, or of the node's RAM where `gpus` is 0."""
    gpus: int = 0
    disk: int = 0
    """Bytes of weights."""


class Constraints(Typed):
    """Which nodes a model may run on, and which it would rather."""

    labels: dict[str, str] = {}
    """A node must have all of them."""
    prefer: dict[str, str] = {}
    """A node that has them scores higher."""
    role: str = ""
    """A node must have this role; "" is any."""
    gpu_model: str = ""
    """A GPU's model must contain this text, whatever its case; "" is any."""
    interconnect: str = ""
    """A label key: all shards of a gang go to nodes with one value of it; "" is no matter."""


class Scaling(Typed):
    """How many replicas by demand; without it the number is `replicas`."""

    min: Annotated[int, Field(ge=0, le=1000)] = 1
    """0: to zero when idle, and the model may be evicted for others while it is idle."""
    max: Annotated[int, Field(ge=1, le=1000)] = 1
    """At least `min` where it is not given."""
    target_in_flight: Annotated[float, Field(gt=0)] = 4.0
    """Requests in flight, smoothed, that one replica should have."""
    cooldown_s: Annotated[float, Field(ge=0)] = 60.0
    """Between a change of the number and the next one downwards."""
    idle_after_s: Annotated[float, Field(ge=0)] = 600.0
    """Without a request for so long, a model with `min` 0 goes to zero."""

    @model_validator(mode="after")
    def _ordered(self) -> "Scaling":
        if "max" not in self.model_fields_set:
            self.__dict__["max"] = max(self.min, self.max)  # not as one that was given: an update keeps the known one
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class Rollout(Typed):
    """How a changed spec replaces what serves."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas beyond the wanted number while it is under way."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replicas that may be missing while it is under way."""
    recreate: bool = False
    """Where there is no room for the new version, stop an old replica first, even the last one."""

    @model_validator(mode="after")
    def _moves(self) -> "Rollout":
        if self.max_surge == 0 and self.max_unavailable == 0 and not self.recreate:
            raise ValueError("max_surge and max_unavailable are both 0: nothing could ever be replaced")
        return self


TokenName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class JobKind(StrEnum):
    """What a model job is for."""

    SERVE = "serve"
    MIRROR = "mirror"  # ends when the mirror has the files
    UPDATE = "update"  # a new revision or spec of a model in the catalog
    REMOVE = "remove"


class ModelRequest(Typed):
    """What a person says about a model: the same words in a job's input and in a file of models."""

    repo: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    """`hf:org/name@rev` (the default scheme), `file:/path`, `https://…`, `s3://…`; a GGUF variant is `repo:Q4_K_M`."""
    name: ModelName | None = None
    """The name clients use; from the repo where it is not given."""
    token: TokenName | None = None
    """Which of the hub's tokens (`hub.tokens` in server.yaml) opens the repo: its name, never the token itself."""
    engine: Engine | None = None
    """The engine that reads the weights' format where it is not given."""
    task: Task | None = None
    """What it is for; from its architecture where it is not given."""
    replicas: Annotated[int, Field(ge=0, le=1000), NotBool] = 1
    nodes: Annotated[int, Field(ge=1, le=64), NotBool] = 1
    """Nodes one replica spans, a shard on each; all of them or none."""
    gpus: Annotated[int, Field(ge=0, le=64), NotBool] = 0
    """Of each shard."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64), NotBool] = 1
    """Stages the layers are spread over, one behind the other; each layer is split over the rest of the devices."""
    memory: Size | None = None
    """Bytes or text such as `12GiB`, for one shard on each device; replaces the estimate."""
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    constraints: Constraints = Constraints()
    scaling: Scaling | None = None
    """Replicas by demand; `replicas` then says how many to begin with."""
    rollout: Rollout = Rollout()
    context_length: Annotated[int, Field(ge=256), NotBool] | None = None
    """Tokens of one request, prompt and answer together; llama.cpp gives no less than 256."""
    concurrency: Annotated[int, Field(ge=1, le=1024), NotBool] = 4
    args: Arguments = ()
    """Further arguments for the engine; `fleet/engine_args.py` says which it does not get."""
    trust_remote_code: bool = False
    """Whether the engine may run Python that came with the model; the node must allow it too."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    drain_deadline_s: Annotated[float, Field(ge=0)] = 30.0

    @model_validator(mode="after")
    def _can_be_spread(self) -> "ModelRequest":
        wrong = spread_fault(self.engine, self.nodes, self.gpus, self.pipeline_parallel)
        if wrong:
            raise ValueError(wrong)
        return self


class JobRequest(ModelRequest):
    """The input of a `ModelJob`, as a person types it into ctl, the CLI or the web UI."""

    cell: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")] = "main"
    """The fleet that does it."""
    kind: JobKind = JobKind.SERVE
    room_deadline_s: Annotated[float, Field(ge=0)] | None = 60.0
    """How long the job waits for a place where no node has room; `null`: until there is one. A minute, because a
    node that is away is back or lost after half a one, and so is what drains."""
    delete_weights: bool = False
    """Of a `remove`: the files in the mirror too, unless another model uses them."""


class ModelSpec(Typed):
    """A model as the catalog keeps it. Two equal specs are the same model: applying one again changes nothing."""

    name: ModelName
    repo: Annotated[str, Field(min_length=1)]
    engine: Engine
    weights: Weights
    need: ShardNeed
    shards: Annotated[int, Field(ge=1, le=64)] = 1
    """Nodes one replica spans, each with `need`: all of them or none."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages the layers are spread over."""
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    priority: Annotated[int, Field(ge=0, le=100), NotBool] = 50
    constraints: Constraints = Constraints()
    scaling: Scaling | None = None
    rollout: Rollout = Rollout()
    context_length: Annotated[int, Field(ge=1)]
    """Tokens of one request, prompt and answer together."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 4
    """Requests one replica works on at a time."""
    args: tuple[str, ...] = ()
    task: Task = Task.GENERATE
    trust_remote_code: bool = False
    """Whether the engine may run Python that came with the weights."""
    request: JobRequest | None = None
    """What was asked for, word for word: the same wish again is no change."""
    start_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """From launch to ready. Ten minutes: a 70B model read from a slow disk with CUDA graphs needs five."""
    drain_deadline_s: Annotated[float, Field(ge=0)] = 30.0

    @property
    def id(self) -> str:
        """The name for machines."""
        return safe_id(self.name)

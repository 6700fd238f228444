"""The settings in server.yaml and agent.yaml; a key that is unknown or wrong is refused with its file and line."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from fleet.spec import Engine
from fleet.state import Policy

MIB = 1024**2
MIRROR_SCHEMES = frozenset({"file", "s3", "gs", "az", "http", "https"})


class ConfigError(Exception):
    """A configuration file cannot be used; the text is one sentence with file, line and what to do."""


class Section(BaseModel):
    """A part of a file: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceStoreConfig(Section):
    """Where `ctl trace` reads spans, when that is not the span file; at most one store."""

    jaeger: str = ""
    """Address of Jaeger's pages, such as `http://127.0.0.1:16686`."""
    tempo: str = ""
    """Address of Tempo's API, such as `http://127.0.0.1:3200`."""
    headers_file: Path | None = None
    """A file of `Name: value` lines that are sent along, such as an authorization; it never stands in a command."""

    @model_validator(mode="after")
    def _one_store(self) -> "TraceStoreConfig":
        if self.jaeger and self.tempo:
            raise ValueError("jaeger and tempo are both named: keep one of them")
        return self


class TracingConfig(Section):
    """Where spans go. Off: every span is the no-op one, and no Temporal command carries a header."""

    enabled: bool = False
    endpoint: str = ""
    """OTLP endpoint, such as `http://127.0.0.1:4317`; empty: no OTLP export."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    headers: dict[str, str] = {}
    """Sent with each OTLP request. May hold a secret: it is never logged."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    service_name: str = ""
    """`service.name`; from the process where it is empty."""
    file: Path | None = None
    """Append spans here as OTLP JSON lines. `{service}` in the name stands for `service.name`."""
    file_max: Annotated[ByteSize, Field(ge=64 * 1024)] = ByteSize(64 * MIB)
    """A file this large becomes `<file>.1`, in place of the one before. A start leaves 10 KiB: 6,000 starts."""


class LogConfig(Section):
    """How a process's log lines look; each names the trace it was written in."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class MetricsConfig(Section):
    """A page that Prometheus scrapes."""

    enabled: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Of the worker; 0 takes any free one, and the log says which."""


class NodeMetricsConfig(MetricsConfig):
    """The same on a node."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9466


class MirrorConfig(Section):
    """Where the fleet keeps one copy of each model's files: a directory, or an address."""

    path: Path | None = None
    url: str = ""
    """`s3://bucket/prefix`, `gs:`, `az:`; `http:` for one that is only read; `file:` as `path`."""
    keep_free: ByteSize = ByteSize(256 * MIB)
    """Never fill the disk beyond this; 256 MiB keeps logs and a database on the same disk alive."""

    @model_validator(mode="after")
    def _one_place(self) -> "MirrorConfig":
        if (self.path is None) == (not self.url):
            raise ValueError("name either `path`, a directory, or `url`, such as s3://bucket/prefix")
        if self.url:
            parts = urlsplit(self.url)
            if parts.scheme not in MIRROR_SCHEMES or not (parts.netloc or parts.scheme == "file"):
                raise ValueError(f"url is not one of {', '.join(sorted(MIRROR_SCHEMES))} with a bucket or host")
            if parts.username is not None or parts.password is not None or parts.query:
                raise ValueError("url holds credentials; they belong in the environment of worker and agents")
        return self

    @property
    def address(self) -> str:
        """The mirror's URL."""
        return self.path.absolute().as_uri() if self.path is not None else self.url.rstrip("/")

    def directory(self, name: str) -> Path:
        """The directory of one model, where the mirror is one."""
        return Path(unquote(urlsplit(self.address).path)) / name


class RestartConfig(Section):
    """How a replica that failed is tried again."""

    attempts: Annotated[int, Field(ge=1)] = 5
    window_s: Annotated[float, Field(gt=0)] = 600.0
    base_s: Annotated[float, Field(gt=0)] = 1.0
    cap_s: Annotated[float, Field(gt=0)] = 60.0


class FleetConfig(Section):
    """The fleet's policy."""

    restart: RestartConfig = RestartConfig()
    unstarted_after_s: Annotated[float, Field(gt=0)] = 30.0
    mass_loss_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    mass_loss_window_s: Annotated[float, Field(gt=0)] = 300.0

    def policy(self) -> Policy:
        """As the Fleet workflow keeps it."""
        return Policy.model_validate(self.model_dump())


class HubConfig(Section):
    """How models are looked up on a hub that speaks Hugging Face's API."""

    endpoint: str = "https://huggingface.co"
    token_file: Path | None = None
    """A file that holds the access token: named here, never carried in a job."""
    tokens: dict[str, Path] = {}
    """Further tokens by name, each in a file: a job names the one that opens its repo."""


class GatewayConfig(Section):
    """Where clients reach the OpenAI-compatible front door."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    wait_for_start_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a request for a model that no replica serves is held while one starts."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9465
    """Where `metrics` is enabled: the gateway's page, on `metrics.host`."""


class ServerConfig(Section):
    """server.yaml: the control plane (`worker.py`) and the gateway."""

    cell: str = "main"
    mirror: MirrorConfig
    hub: HubConfig = HubConfig()
    fleet: FleetConfig = FleetConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine_key_file: Path | None = None
    """The same keys as the nodes' files hold: sent to engines by the gateway and by the smoke test."""
    weights_token_file: Path | None = None
    """The secret of the nodes' `weights.token_file`: the worker then fills the mirror from a node while the hub is
    away."""
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    logging: LogConfig = LogConfig()
    trace_store: TraceStoreConfig = TraceStoreConfig()


class EngineConfig(Section):
    """One engine a node offers."""

    version: str = ""
    """Version to install; the one this llmgw was tested with where it is empty."""
    bin: Path | None = None
    """The Python interpreter of an environment that already has the engine; nothing is installed then."""
    extra_index: str = ""
    """A further package index for the install, such as one with GPU builds."""


class LeaseConfig(Section):
    """How soon this node is noticed when it is silent, and how long it may take to come back."""

    heartbeat_timeout_s: Annotated[float, Field(ge=2)] = 10.0
    grace_s: Annotated[float, Field(ge=0)] = 20.0


class NodeHubConfig(Section):
    """Whether this node may fetch from the hub what nobody nearer has."""

    enabled: bool = False
    token_file: Path | None = None
    """A file that holds the access token, on this node."""


class WeightsConfig(Section):
    """Where a node's weights come from, who may have them from it, and how much of the disk they take."""

    quota: ByteSize | None = None
    """All weights together; those used longest ago are removed for new ones. Without it nothing is ever removed."""
    token_file: Path | None = None
    """A file with the secret that all nodes of the fleet share; without it the node neither serves nor asks others."""
    port: Annotated[int, Field(ge=0, le=65535)] = 20999
    """Where it serves its weights to other nodes, on `address`; 0 takes any free one."""
    hub_cache: Path | None = Path("~/.cache/huggingface/hub")
    """A Hugging Face cache whose files are taken where their hash is right; it is never changed."""
    hub: NodeHubConfig = NodeHubConfig()


class AgentConfig(Section):
    """agent.yaml: one node."""

    node: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")] = Field(
        default_factory=lambda: default_node_name()
    )
    """The node's name in the fleet: lower case letters, digits, dots and dashes."""
    cell: str = "main"
    data: Path
    """Everything the node keeps: ledger, logs, weights, engine environments."""
    address: str = "127.0.0.1"
    """Host or IP on which clients reach this node's engines; engines listen on it only."""
    engine_key_file: Path | None = None
    """A file with the key that engines ask of their clients: one a line, the newest first. Named here, never sent."""
    ports: tuple[int, int] = (21000, 21999)
    """Engines get a free port of this range, both ends included."""
    memory: ByteSize | None = None
    """RAM engines may use in all; measured where it is not given."""
    keep_free: ByteSize = ByteSize(256 * MIB)
    """Disk space weights never take."""
    inventory_file: Path | None = None
    """A YAML file of memory and GPUs that is believed instead of measuring, for tests and plans."""
    keep_logs: ByteSize = ByteSize(512 * MIB)
    """What the engines' logs of the whole node may take; those of engines that run are bounded and stay."""
    labels: dict[str, str] = {}
    roles: tuple[str, ...] = ()
    engines: dict[Engine, EngineConfig] = {Engine.LLAMACPP: EngineConfig()}
    trust_remote_code: bool = False
    """Whether engines may run Python that came with a model, where the model asks for it too."""
    hung_after_s: Annotated[float, Field(ge=1)] = 300.0
    """An engine that has requests and shows no progress for so long hangs, whatever its health says."""
    release_s: Annotated[float, Field(gt=0, le=60)] = 30.0
    """From the end of an engine's processes to free GPU memory: a driver that frees 80 GiB needs a second or two. The
    fleet waits two minutes for the answer to a stop, of which this is a part."""
    interface: str = ""
    """The network interface on which the engines of a gang talk; found by `address` where it is not given."""
    rendezvous_s: Annotated[float, Field(ge=1)] = 60.0
    """How long the shards of a gang wait for each other. All have engine and weights by then: what is left are the
    ways to them, looks at their memory, and perhaps the restart of an agent, which takes ten seconds."""
    weights: WeightsConfig = WeightsConfig()
    lease: LeaseConfig = LeaseConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: NodeMetricsConfig = NodeMetricsConfig()
    logging: LogConfig = LogConfig()


SectionT = TypeVar("SectionT", bound=Section)
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True)
class Document:
    """A YAML file that holds keys and values, and where in it each of them stands."""

    path: Path
    tree: yaml.Node | None
    data: Mapping[str, object]

    def parse(self, kind: type[ModelT]) -> ModelT:
        """The file as a model. Raises ConfigError with a line for each thing that is wrong."""
        try:
            return kind.model_validate(self.data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            raise ConfigError(
                "\n".join(self.complaint(detail["loc"], _say(detail["type"], detail["msg"])) for detail in details)
            ) from error

    def complaint(self, location: tuple[int | str, ...], what: str) -> str:
        """`models.yaml:3: models.0.replcas: unknown key; …`: what is wrong, with the file, the line and the key."""
        key = ".".join(str(part) for part in location) or "file"
        return f"{self.path}:{_line(self.tree, location)}: {key}: {what}"


def read(path: Path) -> Document:
    """Read a YAML file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); write it or name another file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text at byte {error.start}") from error
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}:1: must be keys and values, not {type(data).__name__}")
    return Document(path, tree, data)


def load(path: Path, kind: type[SectionT]) -> SectionT:
    """Read a YAML file into its model. Paths in it are relative to the file. Raises ConfigError."""
    return _resolve_paths(read(path).parse(kind), path.resolve().parent)


def _say(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "unknown key; remove it or correct its name"
    return message.removeprefix("Value error, ")


def _line(tree: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """The line of the deepest part of the location that stands in the file, counted from 1."""
    line = 1 if tree is None else tree.start_mark.line + 1
    node = tree
    for part in location:
        following: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, following = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            following = node.value[part]
            line = node.value[part].start_mark.line + 1
        node = following
    return line


def _resolve_paths(config: SectionT, base: Path) -> SectionT:
    update: dict[str, object] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, (Path, Section)):
            update[name] = _resolved(value, base)
        elif isinstance(value, dict):
            update[name] = {key: _resolved(item, base) for key, item in value.items()}
    return config.model_copy(update=update)


def _resolved(value: object, base: Path) -> object:
    if isinstance(value, Path):
        path = base / value.expanduser()
        # Not the last part: the interpreter of a virtual environment is a link to one that lacks its packages.
        return path.parent.resolve() / path.name
    return _resolve_paths(value, base) if isinstance(value, Section) else value


def default_node_name() -> str:
    """This machine's name, made safe for the fleet."""
    name = socket.gethostname().split(".")[0].lower()
    safe = "".join(char if char.isalnum() and char.isascii() else "-" for char in name).strip("-")
    return safe[:63] or "node"

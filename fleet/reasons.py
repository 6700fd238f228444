"""Why something failed or was refused: one table from reason to step, retry and the sentence a person reads."""

from enum import StrEnum
from typing import NamedTuple

from pydantic import ValidationError

from fleet.records import Record


class Reason(StrEnum):
    """Every cause llmgw can name. The value travels in failures, spans, search and `--json`."""

    # what was asked for
    BAD_INPUT = "bad_input"
    REPO_NOT_FOUND = "repo_not_found"
    REVISION_NOT_FOUND = "revision_not_found"
    REPO_FORBIDDEN = "repo_forbidden"
    NO_WEIGHTS = "no_weights"
    TOKEN_UNKNOWN = "token_unknown"  # noqa: S105 - a reason's name
    HUB_UNREACHABLE = "hub_unreachable"
    HUB_BUSY = "hub_busy"
    # bytes
    WEIGHTS_UNREADABLE = "weights_unreadable"
    WEIGHTS_CORRUPT = "weights_corrupt"
    WEIGHTS_MISSING = "weights_missing"
    MIRROR_UNREACHABLE = "mirror_unreachable"
    DISK_FULL = "disk_full"
    NOT_WRITABLE = "not_writable"
    # does it fit
    DOES_NOT_FIT = "does_not_fit"
    FIT_UNKNOWN = "fit_unknown"
    UNSUPPORTED_ARCHITECTURE = "unsupported_architecture"
    # placement: reasons a node is excluded or refused
    NO_NODES = "no_nodes"
    NODE_CORDONED = "node_cordoned"
    NODE_DRAINING = "node_draining"
    NODE_LOST = "node_lost"
    NODE_QUARANTINED = "node_quarantined"
    LABELS = "labels"
    ROLE = "role"
    GPU_MODEL = "gpu_model"
    REMOTE_CODE = "remote_code"
    ENGINE_MISSING = "engine_missing"
    GPU_COUNT = "gpu_count"
    GPU_MEMORY = "gpu_memory"
    MEMORY = "memory"
    DISK = "disk"
    GANG_INCOMPLETE = "gang_incomplete"
    # the engine on its node
    INSTALL_FAILED = "install_failed"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_FLAG = "bad_flag"
    PORT_IN_USE = "port_in_use"
    RENDEZVOUS = "rendezvous"
    EXITED = "exited"
    NEVER_READY = "never_ready"
    ENGINE_GONE = "engine_gone"
    STALE_GENERATION = "stale_generation"
    # the system itself
    NODE_UNREACHABLE = "node_unreachable"
    SMOKE_TEST_FAILED = "smoke_test_failed"
    STOPPED_BY_HAND = "stopped_by_hand"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class Meaning(NamedTuple):
    """What a reason means: the job step it belongs to, whether trying again can help, and what to do."""

    step: str
    retryable: bool
    advice: str


REASONS: dict[Reason, Meaning] = {
    Reason.BAD_INPUT: Meaning("registry", False, "correct the input and start the job again"),
    Reason.REPO_NOT_FOUND: Meaning(
        "registry", False, "check the name and the path; a private one on a hub needs `--token`"
    ),
    Reason.REVISION_NOT_FOUND: Meaning("registry", False, "name a branch, a tag or a commit that the repo has"),
    Reason.REPO_FORBIDDEN: Meaning("registry", False, "ask for access to the repo and name a token that has it"),
    Reason.NO_WEIGHTS: Meaning("registry", False, "name a repo or file that holds GGUF or safetensors weights"),
    Reason.TOKEN_UNKNOWN: Meaning(
        "registry", False, "name the token's file, for the worker to read, in server.yaml's `hub`"
    ),
    Reason.HUB_UNREACHABLE: Meaning("registry", True, "check the network of the worker, or serve a local `file:`"),
    Reason.HUB_BUSY: Meaning("registry", True, "wait as long as the hub asks, or name a token: it allows more"),
    Reason.WEIGHTS_UNREADABLE: Meaning("check", False, "replace the file: it is truncated or not a model"),
    Reason.WEIGHTS_CORRUPT: Meaning("mirror", True, "fetch the file again: its hash is wrong"),
    Reason.WEIGHTS_MISSING: Meaning("mirror", False, "mirror the model again: a file it names is absent"),
    Reason.MIRROR_UNREACHABLE: Meaning(
        "mirror", True, "check the mirror's address, the way to it, and the credentials for it in the environment"
    ),
    Reason.DISK_FULL: Meaning("mirror", False, "free space on the named path or point it at a larger disk"),
    Reason.NOT_WRITABLE: Meaning("mirror", False, "make the named path writable for llmgw or name another one"),
    Reason.DOES_NOT_FIT: Meaning("check", False, "add memory, use a smaller variant, or lower the context length"),
    Reason.FIT_UNKNOWN: Meaning("check", False, "say the memory one shard needs with --memory"),
    Reason.UNSUPPORTED_ARCHITECTURE: Meaning("check", False, "choose another engine or another model"),
    Reason.NO_NODES: Meaning("placement", True, "start an agent on a machine that is to serve models"),
    Reason.NODE_CORDONED: Meaning("placement", True, "uncordon the node"),
    Reason.NODE_DRAINING: Meaning("placement", True, "uncordon the node when its maintenance is over"),
    Reason.NODE_QUARANTINED: Meaning(
        "placement", True, "end the process it names or restart the machine; uncordon the node to use it all the same"
    ),
    Reason.LABELS: Meaning("placement", True, "label a node in its agent.yaml, or change the model's constraints"),
    Reason.ROLE: Meaning("placement", True, "give a node the role in its agent.yaml, or change the constraints"),
    Reason.GPU_MODEL: Meaning("placement", True, "add a node with such GPUs, or change the constraints"),
    Reason.REMOTE_CODE: Meaning("placement", True, "allow it with `trust_remote_code` in a node's agent.yaml"),
    Reason.NODE_LOST: Meaning("placement", True, "bring the node's agent back"),
    Reason.ENGINE_MISSING: Meaning("placement", True, "add the engine to the node's agent.yaml"),
    Reason.GPU_COUNT: Meaning("placement", True, "ask for fewer GPUs or add a node that has them"),
    Reason.GPU_MEMORY: Meaning("placement", True, "free GPU memory or add a node"),
    Reason.MEMORY: Meaning("placement", True, "free memory on a node or add one"),
    Reason.DISK: Meaning("placement", True, "free disk space for the weights on a node"),
    Reason.GANG_INCOMPLETE: Meaning("placement", True, "free or add nodes: all shards of a replica start, or none"),
    Reason.INSTALL_FAILED: Meaning("placement", False, "read the install's last lines; check the node's package index"),
    Reason.GPU_OUT_OF_MEMORY: Meaning("placement", True, "lower the context length or ask for more memory"),
    Reason.OUT_OF_MEMORY: Meaning("placement", True, "lower the context length or ask for more memory"),
    Reason.BAD_FLAG: Meaning("placement", False, "correct the engine arguments"),
    Reason.PORT_IN_USE: Meaning("placement", True, "another process holds the port; a new one is chosen next time"),
    Reason.RENDEZVOUS: Meaning(
        "placement", True, "check that the replica's nodes reach each other at the addresses of their agent.yaml"
    ),
    Reason.EXITED: Meaning("placement", True, "read the engine's log: `ctl replica logs ID`"),
    Reason.NEVER_READY: Meaning("placement", True, "raise the start deadline or read the engine's log"),
    Reason.ENGINE_GONE: Meaning("placement", True, "nothing to do: the fleet restarts it"),
    Reason.STALE_GENERATION: Meaning("placement", False, "nothing to do: a newer copy of this replica exists"),
    Reason.NODE_UNREACHABLE: Meaning("placement", True, "check the node's agent and its way to Temporal"),
    Reason.SMOKE_TEST_FAILED: Meaning("smoke test", False, "read the engine's log: `ctl replica logs ID`"),
    Reason.STOPPED_BY_HAND: Meaning("placement", False, "start it again with `ctl model retry NAME`"),
    Reason.SUPERSEDED: Meaning("placement", False, "nothing to do: a later job on the same model took its place"),
    Reason.CANCELLED: Meaning("", False, "nothing to do: somebody cancelled it"),
    Reason.INTERNAL: Meaning("", True, "this is a fault of llmgw: please report it with the trace"),
}


class Failure(Record):
    """One failure as data: the reason, what exactly happened, and where."""

    reason: Reason
    detail: str
    """One sentence with the subject, such as the line of the log that shows the cause."""
    node: str = ""
    retry_after_s: float = 0.0
    """How long whoever refused asks to wait; 0: nothing was said."""

    @property
    def retryable(self) -> bool:
        """Whether another attempt can help."""
        return REASONS[self.reason].retryable

    @property
    def sentence(self) -> str:
        """What a person reads: what happened, where, and what to do about it."""
        return self.told()

    def told(self, *, replica: str = "", model: str = "") -> str:
        """The sentence, with the commands of its advice written out for what it is known to be about."""
        where = f" (on {self.node})" if self.node else ""
        advice = REASONS[self.reason].advice
        advice = advice.replace(" ID`", f" {replica}`") if replica else advice
        advice = advice.replace(" NAME`", f" {model}`") if model else advice
        return f"{self.detail.rstrip('.')}{where} — {advice}"

    @property
    def cause(self) -> str:
        """What happened and where, without advice: for where something is done about it already."""
        where = f" (on {self.node})" if self.node else ""
        return f"{self.reason}: {self.detail.rstrip('.')}{where}"

    @property
    def line(self) -> str:
        """The sentence behind its reason, for where the reason is not shown beside it."""
        return f"{self.reason}: {self.sentence}"


def read_failure(data: object) -> Failure | None:
    """A failure that somebody sent; None for what is none, such as one from a newer peer with an unknown reason."""
    try:
        return Failure.model_validate(data)
    except ValidationError:
        return None


class LlmgwError(Exception):
    """Base of every error llmgw raises on purpose; carries a `Failure`.

    LlmgwError
     ├─ StepError      a job's step or a node's act failed for a named reason
     └─ RefusedError   the fleet refused a change; nothing was changed
    """

    def __init__(self, reason: Reason, detail: str, *, node: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.failure = Failure(reason=reason, detail=detail, node=node, retry_after_s=retry_after_s)


class StepError(LlmgwError):
    """A step of a job, or an act on a node, failed for a named reason."""


class RefusedError(LlmgwError):
    """The fleet refuses a change, and nothing was changed."""

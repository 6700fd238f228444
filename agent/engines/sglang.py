"""SGLang: its OpenAI-compatible server, on GPUs. Tried against a stand-in only: it has no wheel for a CPU."""

from dataclasses import dataclass
from pathlib import Path

from agent.engines.adapter import ExitStatus, Launch, diagnose, fraction, gauge_sum, patterns, samples
from agent.engines.pytorch import SHARED
from fleet.reasons import Failure, Reason
from fleet.spec import Engine

LAUNCHER = Path(__file__).parent / "beside" / "llmgw_sglang.py"

# From its documentation and the reports of those who run it. A scheduler that fails takes the server with it by a
# signal, so the cause always stands above the last line.
TABLE = (
    *patterns(
        (r"Not enough memory", Reason.GPU_OUT_OF_MEMORY),
        (r"Unsupported architectures|has no SGlang implementation", Reason.UNSUPPORTED_ARCHITECTURE),
    ),
    *SHARED,
)


DYNAMIC = int(1.5 * 1024**3)
"""Activations and CUDA graphs of a GPU, which SGLang takes beside its static memory: as `fleet/estimate.py` adds."""
DYNAMIC_SHARE = 0.05
"""Of the weights on a GPU, for the same."""


def static_memory(launch: Launch) -> int:
    """Bytes on each GPU for weights and KV cache: what is reserved, less what comes and goes with the requests."""
    dynamic = DYNAMIC + int(DYNAMIC_SHARE * launch.weights_size / launch.devices)
    return max(launch.memory - dynamic, launch.memory // 2)  # a small reservation was made by hand: half of it each


@dataclass(frozen=True)
class SgLang:
    """The `Adapter` of SGLang."""

    engine: Engine = Engine.SGLANG
    module: str = "sglang"
    tested_version: str = ""
    health_path: str = "/health"
    silent_ranks: bool = False

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        return (f"sglang=={version}",)

    def unwanted(self) -> tuple[str, ...]:
        return ()

    def command(self, python: Path, launch: Launch) -> list[str]:
        command = [
            str(python),
            # the launcher adds the key, which SGLang takes on its command line only
            *((str(LAUNCHER),) if launch.key else ("-m", "sglang.launch_server")),
            "--host",
            launch.host,
            "--port",
            str(launch.port),
            "--model-path",
            str(launch.weights / launch.entry),
            "--served-model-name",
            launch.alias,
            "--context-length",
            str(launch.context_length),
            "--max-running-requests",
            str(launch.concurrency),
            "--enable-metrics",
        ]
        if launch.devices > 1 or launch.gpus:
            command += ["--tensor-parallel-size", str(launch.tensor_parallel)]
        if launch.pipeline > 1:
            command += ["--pipeline-parallel-size", str(launch.pipeline)]
        if launch.gpus:
            # of what is free as it starts, others' memory left out
            command += ["--mem-fraction-static", fraction(static_memory(launch), launch.gpu_free)]
        else:
            command += ["--device", "cpu"]
        if launch.trust_remote_code:
            command += ["--trust-remote-code"]
        if launch.gang is not None:
            command += ["--nnodes", str(launch.gang.nodes), "--node-rank", str(launch.gang.rank)]
            command += ["--dist-init-addr", launch.gang.meeting_point, "--dist-timeout", str(launch.gang.timeout_s)]
        return [*command, *launch.args]

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(launch.gpus)}
        if launch.key:
            variables["LLMGW_ENGINE_KEY"] = launch.key
        return variables if launch.gang is None else {**variables, **launch.gang.sockets()}

    def in_flight(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("sglang:num_running_reqs", "sglang:num_queue_reqs"))

    def tokens(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("sglang:prompt_tokens_total", "sglang:generation_tokens_total"))

    def progress(self, metrics: str) -> tuple[float, ...]:
        # Its totals are counted at the end of a request only; what its cache holds moves before.
        return samples(
            metrics,
            (
                "sglang:prompt_tokens_total",
                "sglang:generation_tokens_total",
                "sglang:num_used_tokens",
                "sglang:token_usage",
            ),
        )

    def diagnose(self, status: ExitStatus, tail: str) -> Failure:
        return diagnose(TABLE, status, tail)

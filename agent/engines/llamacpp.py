"""llama.cpp, by way of the package `xllamacpp`: its own C++ server, started by `llamacpp_launcher.py`."""

import re
from dataclasses import dataclass
from pathlib import Path

from agent.engines.adapter import ExitStatus, Launch, diagnose, gauge_sum, patterns, samples
from fleet.reasons import Failure, Reason
from fleet.spec import Engine

LAUNCHER = Path(__file__).with_name("llamacpp_launcher.py")

# Lines of xllamacpp 2026.10.11549, as the tests against the real engine show them.
TABLE = patterns(
    (r"^llmgw: bad argument", Reason.BAD_FLAG),
    (r"failed to open GGUF file .*No such file", Reason.WEIGHTS_MISSING),
    (r"unknown model architecture", Reason.UNSUPPORTED_ARCHITECTURE),
    (r"invalid magic", Reason.WEIGHTS_CORRUPT),
    (r"gguf_init_from_\w+: failed to read", Reason.WEIGHTS_CORRUPT),
    (r"data is not within the file bounds", Reason.WEIGHTS_CORRUPT),
    (r"tensor .* out of bounds", Reason.WEIGHTS_CORRUPT),
    (r"couldn't bind", Reason.PORT_IN_USE),
    (r"insufficient memory", Reason.OUT_OF_MEMORY),
    (r"cuda.*out of memory|cudaMalloc failed", Reason.GPU_OUT_OF_MEMORY),
    (r"failed to allocate|std::bad_alloc|cannot allocate memory", Reason.OUT_OF_MEMORY),
    (r"error loading model", Reason.WEIGHTS_CORRUPT),
    (r"No module named", Reason.INSTALL_FAILED),
)
_STAMP = re.compile(r"^\s*[\d.]+ [A-Z] +")


@dataclass(frozen=True)
class LlamaCpp:
    """The `Adapter` of llama.cpp."""

    engine: Engine = Engine.LLAMACPP
    module: str = "xllamacpp"
    tested_version: str = "2026.10.11549"
    health_path: str = "/health"
    silent_ranks: bool = False

    def packages(self, version: str, *, gpus: bool) -> tuple[str, ...]:
        return (f"xllamacpp=={version}",)

    def unwanted(self) -> tuple[str, ...]:
        return ()

    def command(self, python: Path, launch: Launch) -> list[str]:
        return [
            str(python),
            "-I",
            str(LAUNCHER),
            f"--host={launch.host}",
            f"--port={launch.port}",
            f"--model={launch.weights / launch.entry}",
            f"--alias={launch.alias}",
            # llama.cpp divides its context among its slots, so that each request gets its whole length this way
            f"--context={launch.context_length * launch.concurrency}",
            f"--parallel={launch.concurrency}",
            f"--gpus={len(launch.gpus)}",
            "--",
            *launch.args,
        ]

    def environment(self, launch: Launch) -> dict[str, str]:
        key = {"LLAMA_API_KEY": launch.key} if launch.key else {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(launch.gpus), **key}

    def in_flight(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("llamacpp:requests_processing", "llamacpp:requests_deferred"))

    def tokens(self, metrics: str) -> int | None:
        return gauge_sum(metrics, ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"))

    def progress(self, metrics: str) -> tuple[float, ...]:
        # The tokens it wrote are counted at the end of a request only; n_decode_total moves with every batch.
        return samples(
            metrics, ("llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total")
        )

    def diagnose(self, status: ExitStatus, tail: str) -> Failure:
        return diagnose(TABLE, status, tail, clean=lambda line: _STAMP.sub("", line).strip())

"""Why an engine ended, by the lines it wrote and by how it ended: for every engine every cause."""

import pytest

from agent.engines import ADAPTERS
from agent.engines.adapter import MAX_LINE, ExitStatus
from fleet.reasons import Failure, Reason
from fleet.spec import Engine
from tests.test_engine_goldens import DIAGNOSES as GOLDENS
from tests.test_sglang import FAILURES

# Lines as the engines wrote them: llama.cpp from this machine, vLLM from its measured starts.
DIAGNOSES = [
    (
        Engine.LLAMACPP,
        1,
        ("0.00.035.016 E gguf_init_from_reader: failed to read key-value pairs\n"
        "0.00.046.424 E llama_model_load: error loading model: llama_model_loader: failed to load model from x\n"
        "0.00.047.132 E srv          init: exiting due to model loading error"),
        Reason.WEIGHTS_CORRUPT,
        "gguf_init_from_reader: failed to read key-value pairs (exit code 1)",
    ),
    (
        Engine.LLAMACPP,
        1,
        "0.00.069.395 E llama_model_load: error loading model: unknown model architecture: 'llbma'",
        Reason.UNSUPPORTED_ARCHITECTURE,
        "llama_model_load: error loading model: unknown model architecture: 'llbma' (exit code 1)",
    ),
    (Engine.LLAMACPP, None, "", Reason.EXITED, "the engine ended: killed by signal 9"),
    (Engine.LLAMACPP, None, "0.02.1 I srv: all slots are idle", Reason.EXITED, "the engine ended: killed by signal 9"),
    (Engine.LLAMACPP, 0, "0.02.1 I srv: bye", Reason.EXITED, "srv: bye (exit code 0)"),
    (
        Engine.VLLM,
        2,
        "usage: api_server.py\napi_server.py: error: unrecognized arguments: --no-such-flag",
        Reason.BAD_FLAG,
        "api_server.py: error: unrecognized arguments: --no-such-flag (exit code 2)",
    ),
    (
        Engine.VLLM,
        1,
        ("OSError: [Errno 98] Address already in use\nRuntimeError: Engine core initialization failed. "
        "See root cause above. Failed core proc(s): {}"),
        Reason.PORT_IN_USE,
        "OSError: [Errno 98] Address already in use (exit code 1)",
    ),
    (
        Engine.VLLM,
        1,
        ("(Worker pid=7) safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge\n"
        "RuntimeError: Engine core initialization failed."),
        Reason.WEIGHTS_CORRUPT,
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge (exit code 1)",
    ),
    (
        Engine.VLLM,
        1,
        "ValueError: decrease --gpu-memory-utilization or reduce CPU memory used by other processes\nbye",
        Reason.OUT_OF_MEMORY,
        "ValueError: decrease --gpu-memory-utilization or reduce CPU memory used by other processes (exit code 1)",
    ),
    (
        Engine.VLLM,
        1,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        Reason.GPU_OUT_OF_MEMORY,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (exit code 1)",
    ),
    (
        Engine.VLLM,
        1,
        "ValueError: Model architectures ['NoSuch'] are not supported for now. Supported architectures: dict_keys([])",
        Reason.UNSUPPORTED_ARCHITECTURE,
        ("ValueError: Model architectures ['NoSuch'] are not supported for now. Supported architectures: dict_keys([]) "
        "(exit code 1)"),
    ),
    (Engine.VLLM, 0, "INFO: Application shutdown complete.", Reason.EXITED,
     "INFO: Application shutdown complete. (exit code 0)"),
    (
        Engine.SGLANG,
        1,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        Reason.GPU_OUT_OF_MEMORY,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. (exit code 1)",
    ),
    (
        Engine.SGLANG,
        1,
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 549755813888 bytes. Error code 12 (Cannot allocate memory)"),
        Reason.OUT_OF_MEMORY,
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 549755813888 bytes. Error code 12 (Cannot allocate memory) (exit code 1)"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "code", "log", "reason", "detail"), DIAGNOSES)
def test_diagnosis(engine: Engine, code: int | None, log: str, reason: Reason, detail: str) -> None:
    status = ExitStatus(code=code, signal=9 if code is None else None)
    assert ADAPTERS[engine].diagnose(status, log) == Failure(reason=reason, detail=detail)


def test_a_kill_by_the_kernel_is_out_of_memory() -> None:
    failure = ADAPTERS[Engine.LLAMACPP].diagnose(ExitStatus(signal=9, oom=True), "slots are idle")
    assert failure == Failure(
        reason=Reason.OUT_OF_MEMORY, detail="killed by signal 9 while the kernel was out of memory"
    )
    assert ADAPTERS[Engine.LLAMACPP].diagnose(ExitStatus(code=1, oom=True), "x").reason is Reason.EXITED


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize(
    ("status", "reason", "detail"),
    [
        (ExitStatus(signal=9), Reason.EXITED, "the engine ended: killed by signal 9"),
        (ExitStatus(signal=11), Reason.EXITED, "the engine ended: killed by signal 11"),
        (ExitStatus(code=0), Reason.EXITED, "it is up (exit code 0)"),
        (ExitStatus(code=3), Reason.EXITED, "it is up (exit code 3)"),
        (
            ExitStatus(signal=9, oom=True),
            Reason.OUT_OF_MEMORY,
            "killed by signal 9 while the kernel was out of memory",
        ),
        (ExitStatus(note="its shim was killed"), Reason.EXITED, "it is up (its shim was killed)"),
    ],
)
def test_an_end_without_a_complaint_is_told_by_how_it_ended(
    engine: Engine, status: ExitStatus, reason: Reason, detail: str
) -> None:
    assert ADAPTERS[engine].diagnose(status, "it is up\n") == Failure(reason=reason, detail=detail)


CAUSES = {
    Reason.BAD_FLAG,
    Reason.WEIGHTS_MISSING,
    Reason.WEIGHTS_CORRUPT,
    Reason.UNSUPPORTED_ARCHITECTURE,
    Reason.PORT_IN_USE,
    Reason.GPU_OUT_OF_MEMORY,
    Reason.OUT_OF_MEMORY,
}
"""Of a start that fails, besides those the agent sees for itself: an exit, a signal, the deadline."""


def test_every_engine_has_a_log_of_every_cause() -> None:
    told = {(engine, reason) for engine, _, _, reason, _ in DIAGNOSES}
    for name, said in GOLDENS.items():
        told.add((Engine(name.partition("-")[0]), Reason(said.split(": ")[1])))
    told |= {(Engine.SGLANG, reason) for _, _, reason, _ in FAILURES}
    told.add((Engine.SGLANG, Reason.PORT_IN_USE))  # tests/test_sglang.py, with a port that is really taken
    told.add((Engine.SGLANG, Reason.RENDEZVOUS))
    for engine in Engine:
        gang = {Reason.RENDEZVOUS} if engine is not Engine.LLAMACPP else set[Reason]()
        assert {reason for of, reason in told if of is engine} >= CAUSES | gang, engine


def test_an_endless_line_is_cut() -> None:
    failure = ADAPTERS[Engine.VLLM].diagnose(ExitStatus(code=1), "x" * 10_000)
    assert len(failure.detail) < MAX_LINE + 40

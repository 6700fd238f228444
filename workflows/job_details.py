"""What a job says beside its steps, from what the calls returned: pure."""

from activities.contract import MirrorResult, SmokeRequest, SmokeResult
from fleet.endpoints import server_of
from fleet.render import duration, size, speed
from fleet.spec import ResolvedModel, Task
from fleet.wishes import Applied
from workflows.messages import ModelStatus


def resolved_detail(resolved: ResolvedModel) -> str:
    """`hf:org/name at 0123456789ab: 3 files, 2 GiB, safetensors`."""
    count = len(resolved.files)
    files = f"{count} file{'s' if count != 1 else ''}, {size(resolved.size)}, {resolved.format}"
    note = f" ({resolved.note})" if resolved.note else ""
    return f"{resolved.repo} at {resolved.revision[:12]}: {files}{note}"


def mirrored_detail(mirrored: MirrorResult) -> str:
    """`copied 2 GiB in 12 s (170 MiB/s)`, and whether nodes gave it because the hub was away."""
    if mirrored.outcome == "already mirrored":
        return f"already mirrored, {size(mirrored.weights.size)}"
    rate = mirrored.copied_bytes / mirrored.seconds if mirrored.seconds > 0 else 0.0
    given = f", {size(mirrored.peer_bytes)} of it from nodes" if mirrored.peer_bytes else ""
    return f"copied {size(mirrored.copied_bytes)} in {duration(mirrored.seconds)} ({size(round(rate))}/s){given}"


def applied_detail(name: str, applied: Applied) -> str:
    """What the catalog made of the spec."""
    if applied.created:
        return f"{name} is new in the catalog"
    if applied.restarts:
        return f"{name} changed: version {applied.spec_version} replaces what serves"
    if applied.changed:
        return f"{name} changed, and what serves goes on: {applied.difference}"
    return f"{name} is in the catalog already, unchanged"


def smoke_detail(result: SmokeResult) -> str:
    """`12 tokens in 0.4 s, 30 tokens/s`."""
    took = f"in {duration(result.seconds)}, {speed(result.tokens_per_second)}"
    what = f"{result.completion_tokens} tokens" if result.task is Task.GENERATE else result.answer
    return f"{what} {took}"


def smoke_question(request: SmokeRequest) -> dict[str, str | int]:
    """The span's attributes, as the conventions for generative AI name them."""
    operation = {Task.GENERATE: "chat", Task.EMBED: "embeddings", Task.RERANK: "rerank"}[request.task]
    asked = {"gen_ai.operation.name": operation, "gen_ai.request.model": request.model}
    return {**asked, **server_of(request.endpoint)}


def smoke_answer(result: SmokeResult) -> dict[str, str | int]:
    """The same of the answer: what the engine stated."""
    made = result.completion_tokens if result.task is Task.GENERATE else 0
    stated: dict[str, str | int] = {
        "gen_ai.response.model": result.served_as,
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": made,
    }
    return {name: value for name, value in stated.items() if value}


def first_token(result: SmokeResult) -> dict[str, str | int | float]:
    """What the event of its coming says beside them."""
    return {"gen_ai.response.time_to_first_chunk": round(result.first_token_s, 6)}


def endpoint_of(status: ModelStatus) -> str:
    """URL of a replica that serves; "" where none does."""
    return next((replica.endpoint for replica in status.replicas if replica.endpoint), "")

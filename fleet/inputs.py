"""What somebody typed, read: a model of it, or one sentence that names what is wrong; and the spec it becomes."""

from pydantic import ValidationError

from fleet.reasons import Reason, RefusedError
from fleet.spec import Engine, JobRequest, ModelSpec, ShardNeed, Weights


def read_request(given: object) -> JobRequest:
    """A job's input; RefusedError with one sentence for what cannot be one. Nothing given is an empty input."""
    try:
        return JobRequest.model_validate({} if given is None else given)
    except ValidationError as error:
        raise RefusedError(Reason.BAD_INPUT, input_sentence(error)) from None


def input_sentence(error: ValidationError) -> str:
    """One line for one wrong input: `replcas: Extra inputs are not permitted; …`. Never repeats the input itself."""
    return "; ".join(
        f"{'.'.join(str(part) for part in detail['loc']) or 'input'}: {detail['msg'].removeprefix('Value error, ')}"
        for detail in error.errors(include_url=False, include_input=False)
    )


def spec_of(
    name: str,
    request: JobRequest,
    *,
    repo: str,
    engine: Engine,
    weights: Weights,
    need: ShardNeed,
    context_length: int,
) -> ModelSpec:
    """What the catalog keeps of a request, once it is known what its repo holds, what reads it and what it needs."""
    return ModelSpec(
        name=name,
        repo=repo,
        engine=engine,
        weights=weights,
        need=need,
        replicas=request.replicas,
        priority=request.priority,
        constraints=request.constraints,
        scaling=request.scaling,
        rollout=request.rollout,
        context_length=context_length,
        concurrency=request.concurrency,
        args=request.args,
        request=request,
        start_deadline_s=request.start_deadline_s,
        drain_deadline_s=request.drain_deadline_s,
    )

"""What somebody typed, read: a model of it, or one sentence that names what is wrong; and the spec it becomes."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from fleet.paper import CheckWish
from fleet.reasons import Reason, RefusedError
from fleet.spec import Engine, JobKind, JobRequest, ModelRequest, ModelSpec, ShardNeed, Task, Weights

LEAST_MEMORY = 1024**2
"""Bytes: nothing serves in less than a MiB, so the unit is missing."""

SECRET = re.compile(r"hf_[A-Za-z0-9]{20,}")
"""How the hub's own tokens look."""

OF_THE_JOB = frozenset(JobRequest.model_fields) - frozenset(ModelRequest.model_fields)
"""What a request says of the job alone: nothing of it is kept with the model."""


def read_request(given: object) -> JobRequest:
    """A job's input; RefusedError with one sentence for what cannot be one. Nothing given is an empty input."""
    try:
        return JobRequest.model_validate({} if given is None else given)
    except ValidationError as error:
        raise RefusedError(Reason.BAD_INPUT, input_sentence(error)) from None


def read_check(inputs: Sequence[object], example: str) -> CheckWish:
    """The input of a check; RefusedError with one sentence for what cannot be one."""
    if len(inputs) != 1:
        raise RefusedError(Reason.BAD_INPUT, f"input: a ModelCheck takes one input, not {len(inputs)}: {example}")
    try:
        wish = CheckWish.model_validate({} if inputs[0] is None else inputs[0])
    except ValidationError as error:
        raise RefusedError(Reason.BAD_INPUT, input_sentence(error)) from None
    if wish.repo is None:
        raise RefusedError(Reason.BAD_INPUT, f"repo: Field required, such as {example}")
    return wish


def typed_fault(request: ModelRequest, *, ram: int | None = None) -> str:
    """What a person surely did not mean, in a sentence; empty where there is nothing. Only what is typed is looked at:
    what is stored was taken once. `ram`: of a machine on paper."""
    for name, said in (("memory", request.memory), ("ram", ram)):
        if said is not None and said < LEAST_MEMORY:
            return f"{name}: {int(said)} bytes are less than any engine takes: name the unit, as in 12GiB"
    if request.token is not None and SECRET.fullmatch(request.token):
        return (
            "token: that looks like a token itself, and a job is no place for it: write it into a file, give the file "
            "a name in `hub.tokens` of server.yaml, and say that name"
        )
    return ""


def input_sentence(error: ValidationError) -> str:
    """One line for one wrong input: `replcas: Extra inputs are not permitted; …`. Never repeats the input itself."""
    details = error.errors(include_url=False, include_input=False)
    return "; ".join(_complaint(detail["loc"], detail["type"], detail["msg"]) for detail in details)


def _complaint(location: tuple[int | str, ...], kind: str, message: str) -> str:
    where, what = ".".join(str(part) for part in location), message.removeprefix("Value error, ")
    if kind == "model_type":
        what = "Input should be an object with fields"
    if kind == "value_error" and not where:
        return what  # a rule over several fields names them itself
    return f"{where or 'input'}: {what}"


def spec_of(
    name: str,
    request: JobRequest,
    *,
    repo: str,
    engine: Engine,
    weights: Weights,
    need: ShardNeed,
    context_length: int,
    task: Task = Task.GENERATE,
) -> ModelSpec:
    """What the catalog keeps of a request, once it is known what its repo holds, what reads it and what it needs."""
    return ModelSpec(
        name=name,
        repo=repo,
        engine=engine,
        weights=weights,
        need=need,
        shards=request.nodes,
        pipeline_parallel=request.pipeline_parallel,
        replicas=request.replicas,
        priority=request.priority,
        constraints=request.constraints,
        scaling=request.scaling,
        rollout=request.rollout,
        context_length=context_length,
        concurrency=request.concurrency,
        args=request.args,
        task=request.task or task,
        trust_remote_code=request.trust_remote_code,
        request=_kept(request),
        start_deadline_s=request.start_deadline_s,
        drain_deadline_s=request.drain_deadline_s,
    )


def updated(known: JobRequest, given: JobRequest) -> JobRequest:
    """What an update comes to: what was given over what the catalog knows; what was left out keeps its value.

    `constraints`, `scaling` and `rollout` are taken field by field, too. Raises RefusedError where both together are
    no request, such as a `min` above the known `max`.
    """
    merged = {**_given(known, ModelRequest.model_fields.keys()), **_given(given, OF_THE_JOB)}
    for name in given.model_fields_set - OF_THE_JOB:
        before, now = getattr(known, name), getattr(given, name)
        both = isinstance(before, BaseModel) and isinstance(now, BaseModel)
        merged[name] = {**before.model_dump(), **now.model_dump(exclude_unset=True)} if both else now
    return read_request({**merged, "name": known.name})


def request_of(spec: ModelSpec) -> JobRequest:
    """What was asked for when this spec was made."""
    if spec.request is not None:
        return spec.request.model_copy(update={"name": spec.name})
    same = {name: getattr(spec, name) for name in ModelRequest.model_fields if name in ModelSpec.model_fields}
    return JobRequest.model_validate({**same, "nodes": spec.shards})


def _kept(request: JobRequest) -> JobRequest:
    """The request as the catalog keeps it: two that say the same of the model are equal, whatever job said it."""
    said = _given(request, ModelRequest.model_fields.keys())
    return JobRequest.model_validate({**said, "cell": request.cell, "kind": JobKind.SERVE})


def _given(request: JobRequest, names: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in names}

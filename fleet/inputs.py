"""What somebody typed, read: a model of it, or one sentence that names what is wrong."""

from pydantic import ValidationError

from fleet.reasons import Reason, RefusedError
from fleet.spec import JobRequest


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

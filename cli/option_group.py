"""Options that several commands share, declared once as the fields of a dataclass."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast, get_type_hints


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command of keyword arguments; each field of its one dataclass parameter is an option, in that one's place."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    [group] = [parameter for parameter in own if dataclasses.is_dataclass(parameter.annotation)]
    hints = get_type_hints(group.annotation, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group.annotation)
    ]

    @functools.wraps(command)
    def run(**said: Any) -> None:
        options = group.annotation(**{field.name: said.pop(field.name) for field in fields})
        command(**said, **{group.name: options})

    at = own.index(group)
    parameters = [*own[:at], *fields, *own[at + 1 :]]
    # typer reads both of them.
    shown = cast("Any", run)
    shown.__signature__ = inspect.Signature(parameters)
    shown.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run

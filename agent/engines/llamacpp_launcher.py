"""Starts llama.cpp's server in this process; run by the engine's own interpreter, which has `xllamacpp` and no llmgw.

SIGTERM keeps its default: it ends the process at once, also while the model loads. llama.cpp has no drain mode, so
whoever stops it has waited for its requests before.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

import xllamacpp

OURS = frozenset(
    {"model", "hostnames", "port", "reuse_port", "model_alias", "n_ctx", "n_parallel", "endpoint_metrics", "api_prefix"}
)
"""Set from the request of the fleet."""
SHUT = frozenset(
    {
        "api_keys",
        "hf_token",
        "mcp_servers_config",
        "mcp_servers_json",
        "media_path",
        "models_dir",
        "models_preset",
        "models_preset_hf",
        "path_prompts_log_dir",
        "public_path",
        "server_base",
        "server_tools",
        "server_tools_runtime",
        "slot_save_path",
        "ssl_file_cert",
        "ssl_file_key",
        "ui_mcp_proxy",
    }
)
"""Would open files, tools or other addresses to clients, put a secret on a command line, or lock the agent out."""
TRUE, FALSE = frozenset({"true", "1", "on", "yes"}), frozenset({"false", "0", "off", "no"})


ALL_LAYERS = 9999
"""More than any model has; fewer can be asked for by an argument, the rest then runs on the CPU."""


class ArgumentError(Exception):
    """An extra argument cannot be used; the text says which and why."""


def main() -> int:
    """Serve until a signal ends the process; 1: the server did not start, 2: a bad argument."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--context", required=True, type=int)
    parser.add_argument("--parallel", required=True, type=int)
    parser.add_argument("--gpus", required=True, type=int)
    parser.add_argument("extra", nargs="*")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    # The fleet has placed it: shrinking its context to what is free now would break what was promised to clients.
    params.fit_params = False
    # Its prompt cache in RAM grows to 8 GiB beside what was reserved for it; one that is asked for is the operator's.
    params.cache_ram_mib = 0
    bind(params, given.gpus)
    try:
        apply(params, given.extra)
    except ArgumentError as error:
        say(f"llmgw: bad argument {error}")
        return 2
    params.model.path = given.model
    params.hostnames = [given.host]
    params.port = given.port
    params.model_alias = {given.alias}
    params.n_ctx = given.context
    params.n_parallel = given.parallel
    params.endpoint_metrics = True
    key = os.environ.pop("LLAMA_API_KEY", "")
    if key:
        params.api_keys = [key]
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as error:
        flush()
        say(f"llmgw: the server did not start: {error}")
        return 1
    say(f"llmgw: serving at {server.listening_address}")
    while True:
        signal.pause()


def bind(params: xllamacpp.CommonParams, gpus: int) -> None:
    """All layers on the GPUs it was given, in equal parts, as the same is reserved on each; on none without any.

    How much it takes follows from weights, context and slots: llama.cpp has no limit to set.
    """
    params.n_gpu_layers = ALL_LAYERS if gpus else 0
    if gpus > 1:
        params.tensor_split = [1.0] * gpus + [0.0] * (len(params.tensor_split) - gpus)


def apply(params: object, extra: Sequence[str]) -> None:
    """Set each `key=value` on the parameters; a key may have a dot, such as `cpuparams.n_threads=4`."""
    for argument in extra:
        key, equals, text = argument.partition("=")
        key = key.removeprefix("--").replace("-", "_")
        if not equals:
            raise ArgumentError(f"{argument!r}: write it as key=value")
        if key.partition(".")[0] in OURS | SHUT:
            raise ArgumentError(f"{argument!r}: {key} is set by llmgw or closed")
        *path, name = key.split(".")
        target = params
        for part in path:
            target = setting(target, part, argument)
        value = convert(setting(target, name, argument), text, argument)
        try:
            setattr(target, name, value)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"{argument!r}: {error}") from error


def setting(target: object, name: str, argument: str) -> object:
    """The present value of a setting; its type says how the text is read."""
    if name.startswith("_") or not hasattr(target, name) or callable(getattr(target, name)):
        raise ArgumentError(f"{argument!r}: llama.cpp has no setting {name!r}")
    return getattr(target, name)


def convert(present: object, text: str, argument: str) -> object:
    """The text as the type of the present value."""
    try:
        if isinstance(present, bool):
            if text.lower() not in TRUE | FALSE:
                raise ValueError("true or false is expected")
            return text.lower() in TRUE
        if isinstance(present, int):
            return type(present)(int(text))
        if isinstance(present, float):
            return float(text)
        if isinstance(present, str):
            return text
    except ValueError as error:
        raise ArgumentError(f"{argument!r}: {error}") from error
    raise ArgumentError(f"{argument!r}: a setting of this kind cannot be given as text")


def flush() -> None:
    """Let llama.cpp write what it has to say.

    A thread of its own does that: one start in forty that failed ended before it, and nobody knew why.
    """
    library = ctypes.CDLL(sys.modules[xllamacpp.Server.__module__].__file__)
    try:
        log, wait = library["_Z15common_log_mainv"], library["_Z16common_log_flushP10common_log"]
    except AttributeError:
        return  # another version, which keeps them to itself: what was written by now has to do
    log.restype = ctypes.c_void_p
    wait(ctypes.c_void_p(log()))


def say(line: str) -> None:
    """One line into the engine's log."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

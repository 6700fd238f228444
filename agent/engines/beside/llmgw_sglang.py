"""Starts SGLang's server in this process with a key that no list of processes shows; run by the engine's interpreter.

SGLang takes its key as an argument only, and writes its arguments into its log. Here the argument is added inside the
process, and taken out of what is logged.
"""

import logging
import os
import runpy
import sys

VARIABLE = "LLMGW_ENGINE_KEY"


def main() -> None:
    """As `python -m sglang.launch_server`, with the key of the environment."""
    key = os.environ[VARIABLE]
    make = logging.getLogRecordFactory()

    def without_key(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        if key in text:
            record.msg, record.args = text.replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(without_key)
    sys.argv += ["--api-key", key]
    sys.path[0] = ""  # as with -m: what lies beside this file is not the engine's
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

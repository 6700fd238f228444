"""How our processes end: what is written is flushed, and the interpreter is not taken apart.

The Temporal SDK's own threads may hold the interpreter's lock at its end, and about one process in ten would die with
"Fatal Python error: PyGILState_Release" instead of its exit code.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a program's main function and end the process with its code; an error it lets through is shown and is 1."""
    code = 1
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may be gone
                stream.flush()
        os._exit(code)

"""The C library's heap of a process with many threads that mostly wait: one for all, not one for each."""

import ctypes

M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def one_heap() -> None:
    """Call it before threads are started: an agent is a tenth smaller. Other C libraries have no such setting."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_ARENA_MAX, 1)

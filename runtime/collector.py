"""Python's garbage collector as a control worker needs it: it holds much that lives, and makes little in circles.

A plan for thousands of replicas keeps a verdict of each node for each. With Python's own thresholds the collector walks
all of them again and again while they are made.
"""

import gc

MADE_BEFORE_A_LOOK = 50_000
"""Objects made before the youngest are looked at; Python's own is 700. A plan's answers of 1,000 nodes are 5,000."""


def quieten() -> None:
    """Leave alone what is imported, and look rarely; call it once, when everything is imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MADE_BEFORE_A_LOOK, 20, 50)

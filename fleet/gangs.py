"""What shards of one gang have to agree on: which of their failures is the cause, and which port comes next."""

import hashlib
from collections.abc import Sequence

from fleet.reasons import Failure, Reason

ECHOES = frozenset({Reason.RENDEZVOUS, Reason.EXITED, Reason.ENGINE_GONE, Reason.NEVER_READY, Reason.CANCELLED})
"""What a shard also says that has nothing wrong but a peer."""


def may_be_echo(failure: Failure) -> bool:
    """Whether another shard may still tell why."""
    return failure.reason in ECHOES


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The one that explains the others: the first that is no echo, or else the first. They come in their order."""
    return next((failure for failure in failures if not may_be_echo(failure)), failures[0])


def passed_over(replica: str, tried: int) -> int:
    """How many ports, 0 to 3, a gang leaves out after it met another gang's port, having tried so many.

    Two gangs of the same nodes that choose at the same moment, each led by another node, would else propose the same
    port, each have it refused, and propose the next, for as long as they keep step. A hash, so that it differs between
    replicas and repeats in a replay.
    """
    return hashlib.sha256(f"{replica}/{tried}".encode()).digest()[0] % 4

"""Which of several failures of one gang is the cause: the others only say that a peer is gone."""

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

"""Busy, late, idle and hung engines as values."""

import pytest

from fleet.liveness import Look, Pulse, felt, why_hung

HUNG, SILENT = 30.0, 100.0


def pulse(*looks: tuple[float, int | None, tuple[float, ...]]) -> Pulse:
    made = Pulse(moved_at=0.0, answered_at=0.0)
    for at, in_flight, progress in looks:
        made = felt(made, Look(in_flight, progress), at)
    return made


CASES = [
    ("moves however long its queue", ((10, 500, (1,)), (50, 900, (2,)), (90, 999, (3,))), 91, ""),
    ("nothing to do", ((10, 0, (1,)), (50, 0, (1,)), (90, 0, (1,))), 91, ""),
    ("stands still", ((10, 3, (1, 2)), (20, 3, (1, 2)), (40, 4, (1, 2))), 41, "30 s with 4 requests in flight"),
    ("stands still, not long enough", ((10, 3, (1,)), (39, 3, (1,))), 40, ""),
    ("stood still and moves", ((10, 3, (1,)), (39, 3, (1,)), (45, 3, (2,)), (60, 3, (2,))), 60, ""),
    ("the last request went", ((10, 3, (1,)), (39, 0, (1,)), (45, 1, (1,)), (68, 1, (1,))), 68, ""),
    (
        "each request is given up before its patience is out",
        ((10, 1, (1,)), (25, 1, (1,)), (40, 0, (1,)), (300, 1, (1,)), (316, 2, (1,))),
        317,
        "31 s with 2 requests in flight",
    ),
    (
        "each is given up, but one of them was begun",
        ((10, 1, (1,)), (25, 1, (1,)), (40, 0, (1,)), (50, 1, (1.5,)), (66, 1, (1.5,))),
        67,
        "",
    ),
    ("seldom asked for what it refuses", tuple((at, at // 10 % 2, (1,)) for at in range(10, 990, 10)), 991, ""),
    ("a gauge that falls is movement", ((10, 3, (1, 0.5)), (45, 3, (1, 0.25))), 45, ""),
    ("late by far, and alive", ((10, 3, (1,)), (99, 3, (2,))), 99, ""),
    ("late, and it is not known yet", ((10, 3, (1,)),), 99, ""),
    ("silent for ever", ((10, 3, (1,)),), 110, "/metrics has not been answered for 100 s"),
    ("does not say what it does", ((10, 3, ()), (90, 3, ())), 91, ""),
    ("does not say what it has", ((10, None, (1,)), (90, None, (1,))), 91, ""),
    ("began anew", ((10, 3, (9,)), (39, 3, (0,)), (60, 3, (0,))), 60, ""),
]


@pytest.mark.parametrize(("looks", "now", "why"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_hung(looks: tuple[tuple[float, int | None, tuple[float, ...]], ...], now: float, why: str) -> None:
    said = why_hung(pulse(*looks), now, HUNG, SILENT)
    assert (why in said) if why else said == ""

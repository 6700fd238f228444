"""When a node tells how busy it is, as a table of what the fleet has heard and what was read since."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.loads import AGAIN_S, Loads
from fleet.demand import LOADS_GAP_S, loads_gap_s
from fleet.facts import Load


def load(in_flight: int, replica: str = "m-0", generation: int = 1) -> Load:
    return Load(replica=replica, generation=generation, in_flight=in_flight)


def after(told: int | None, *, at: float = 0.0) -> Loads:
    """The fleet has heard this number."""
    loads = Loads()
    if told is not None:
        loads.tried(at)
        loads.taken((load(told),), at)
    return loads


CASES: list[tuple[str, int | None, int, float, bool]] = [
    ("a new one is idle", None, 0, LOADS_GAP_S, False),
    ("a new one is busy", None, 1, LOADS_GAP_S, True),
    ("it leaves zero", 0, 1, LOADS_GAP_S, True),
    ("it reaches zero", 1, 0, LOADS_GAP_S, True),
    ("but the last report is young", 1, 0, LOADS_GAP_S - 0.1, False),
    ("it stays idle", 0, 0, 100 * AGAIN_S, False),
    ("it stays the same", 10, 10, LOADS_GAP_S, False),
    ("a tenth more", 10, 11, LOADS_GAP_S, False),
    ("a fifth more", 10, 12, LOADS_GAP_S, True),
    ("a fifth less", 10, 8, LOADS_GAP_S, True),
    ("one more of few", 3, 4, LOADS_GAP_S, True),
    ("it stays the same for a while", 10, 10, AGAIN_S, True),
]


@pytest.mark.parametrize(("told", "read", "now", "due"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_due(told: int | None, read: int, now: float, due: bool) -> None:
    loads = after(told)
    loads.read(load(read))
    assert loads.due(now) == ((load(read),) if due else ())


def test_what_else_is_in_flight_comes_along_and_what_is_idle_does_not() -> None:
    loads = after(10)
    for one in (load(11), load(2, "m-1"), load(0, "m-2")):
        loads.read(one)
    assert loads.due(LOADS_GAP_S) == (load(11), load(2, "m-1"))


def test_a_number_that_was_not_read_again_is_not_told() -> None:
    loads = Loads()
    loads.read(load(3))
    loads.read(load(4, "m-1"))
    loads.unread("m-0")
    assert loads.due(0) == (load(4, "m-1"),)
    loads.keep({"m-0"})
    assert loads.due(0) == ()


def test_a_report_that_was_lost_is_made_good_by_the_next() -> None:
    loads = after(4)
    loads.read(load(0))
    loads.tried(10)
    assert loads.due(10 + LOADS_GAP_S - 0.1) == ()
    assert loads.due(10 + LOADS_GAP_S) == (load(0),)


@pytest.mark.parametrize(("nodes", "gap"), [(1, 5.0), (250, 5.0), (500, 10.0), (1000, 20.0)])
def test_the_more_nodes_the_more_seldom_each_tells(nodes: int, gap: float) -> None:
    assert loads_gap_s(nodes) == gap
    loads = after(4)
    loads.pace(loads_gap_s(nodes))
    loads.read(load(0))
    loads.tried(100)
    assert (loads.due(100 + gap - 0.1), loads.due(100 + gap)) == ((), (load(0),))


def test_another_generation_begins_with_nothing_in_flight() -> None:
    loads = after(4)
    loads.read(load(0, generation=2))
    assert loads.due(100) == ()
    loads.read(load(1, generation=2))
    assert loads.due(100) == (load(1, generation=2),)


def test_what_the_fleet_may_believe_wrongly_is_told_once_even_when_it_is_idle() -> None:
    loads = Loads()
    loads.unsure({"m-0"})
    loads.read(load(0))
    loads.read(load(0, "m-1"))
    assert loads.due(0) == (load(0),)
    loads.taken((load(0),), 0)
    assert loads.due(1000) == ()


@given(st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 20)), max_size=60))
def test_reports_keep_their_distance_and_the_fleet_is_never_far_off(reads: list[tuple[float, int]]) -> None:
    loads, now, known, sent_at = Loads(), 0.0, 0, float("-inf")
    for wait, count in reads:
        now += wait
        loads.read(load(count))
        due = loads.due(now)
        if due:
            assert now - sent_at >= LOADS_GAP_S
            loads.tried(now)
            loads.taken(due, now)
            known, sent_at = due[0].in_flight, now
        elif now - sent_at >= LOADS_GAP_S:
            assert (known == 0) == (count == 0)
            assert abs(known - count) < max(1, known / 5)
            assert count == 0 or now - sent_at < AGAIN_S

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.ports import PortChoice, PortTakenError, PortWish, choose

TEMPORAL = PortWish("Temporal", 7233, setting="--port")
UI = PortWish("the web UI", 8233, setting="--ui-port")
GATEWAY = PortWish("the gateway", 8080, setting="--gateway-port")
ALL = (TEMPORAL, UI, GATEWAY)


@pytest.mark.parametrize(
    ("taken", "ports", "notes"),
    [
        ({}, (7233, 8233, 8080), ()),
        (
            {7233: "temporal (pid 123)"},
            (7234, 8233, 8080),
            ("port 7233 is taken by temporal (pid 123); using 7234 for Temporal instead",),
        ),
        (
            {8080: "another process", 8081: "node (pid 9)"},
            (7233, 8233, 8082),
            ("port 8080 is taken by another process; using 8082 for the gateway instead",),
        ),
    ],
)
def test_a_taken_default_gives_way_and_says_to_whom(
    taken: dict[int, str], ports: tuple[int, ...], notes: tuple[str, ...]
) -> None:
    assert choose(ALL, lambda port: taken.get(port, "")) == PortChoice(ports, notes)


def test_an_explicit_port_that_is_taken_is_an_error_with_the_holder() -> None:
    wish = PortWish("the gateway", 9000, explicit=True, setting="--gateway-port")
    with pytest.raises(PortTakenError) as caught:
        choose((wish,), lambda port: "nginx (pid 77)" if port == 9000 else "")
    assert str(caught.value) == (
        "port 9000 for the gateway is taken by nginx (pid 77): stop it, or name another with --gateway-port"
    )


def test_an_explicit_port_is_not_taken_away_by_a_default_that_comes_first() -> None:
    wishes = (TEMPORAL, PortWish("the gateway", 7233, explicit=True, setting="--gateway-port"))
    assert choose(wishes, lambda port: "").ports == (7234, 7233)


def test_two_explicit_wishes_for_one_port_are_an_error() -> None:
    wishes = (
        PortWish("Temporal", 9000, explicit=True, setting="--port"),
        PortWish("the web UI", 9000, explicit=True, setting="--ui-port"),
    )
    with pytest.raises(PortTakenError, match="port 9000 for Temporal is taken by the web UI of this system"):
        choose(wishes, lambda port: "")


def test_a_search_that_finds_nothing_ends_with_a_sentence() -> None:
    wish = PortWish("the gateway", 65530, setting="--gateway-port")
    with pytest.raises(PortTakenError, match="no port from 65530 to 65535 is free for the gateway"):
        choose((wish,), lambda port: "x")


@given(taken=st.sets(st.sampled_from([*range(7230, 7240), *range(8078, 8086), *range(8230, 8240)])))
def test_every_choice_is_free_and_given_once(taken: set[int]) -> None:
    choice = choose(ALL, lambda port: "x" if port in taken else "")
    assert len(set(choice.ports)) == 3
    assert not set(choice.ports) & taken
    assert len(choice.notes) == sum(wish.port in taken for wish in ALL)

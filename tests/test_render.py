"""Numbers as a person reads them."""

import pytest

from fleet.render import duration, size, speed


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (98_000_000, "93.5 MiB"), (80 * 1024**3, "80 GiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0 ms"),
        (0.495, "495 ms"),
        (0.9997, "1.0 s"),
        (1.6, "1.6 s"),
        (59.96, "1 min 00 s"),
        (75.0, "1 min 15 s"),
        (3700.0, "1 h 01 min"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.4347, "0.435"), (6.02, "6.02"), (30.25, "30.2"), (999.4, "999"), (1234.5, "1234")],
)
def test_speeds(value: float, text: str) -> None:
    assert speed(value) == f"{text} tokens/s"

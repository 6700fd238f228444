"""Writes the texts that tests/test_golden_plans.py compares: `python -m tests.record_plans`, then read the difference.

What changes in them is what people will read, so each changed line is meant or a fault.
"""

from pathlib import Path

from tests.situations.text import golden, situations

PLANS = Path(__file__).parent / "goldens" / "plans"


def record() -> None:
    """One file for each situation; those of situations that are gone go too."""
    PLANS.mkdir(parents=True, exist_ok=True)
    found = situations()
    for old in PLANS.glob("*.txt"):
        if old.stem not in found:
            old.unlink()
    for name, situation in found.items():
        (PLANS / f"{name}.txt").write_text(golden(name, situation), encoding="utf-8")


if __name__ == "__main__":
    record()

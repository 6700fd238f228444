"""Named situations of a fleet, each a pure function; its docstring's first line says what it is about.

`tests/test_golden_plans.py` compares what the planner makes of each with the text in `tests/goldens/plans/`, and
`python -m tests.record_plans` writes those texts anew.
"""

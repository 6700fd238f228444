"""Measurements of the planner: run by hand, printed as numbers, never asserted on."""

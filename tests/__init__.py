"""The tests: values first, then real servers and real processes."""

"""The fleet's rules as values: what a model asks for, what a node has, and what should happen next.

Pure: standard library and pydantic only, no clock, no randomness, no I/O. Time comes in as an argument
(seconds since the epoch), so every decision can be replayed and tested as a table.
"""

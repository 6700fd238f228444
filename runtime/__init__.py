"""What every process shares: configuration, tracing, and the one way to connect to Temporal."""

VERSION = "0.1.0"
"""Of llmgw; the same as in pyproject.toml."""

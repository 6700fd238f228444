"""The secret that opens the doors of nodes for their weights, from the file that a setting names."""

from pathlib import Path

from runtime.config import ConfigError


def read_secret(path: Path | None, setting: str = "weights.token_file") -> str:
    """The secret all nodes share; empty where none is configured. Raises ConfigError."""
    if path is None:
        return ""
    try:
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the secret in {setting} cannot be read; copy the fleet's there") from error
    if not secret.isprintable() or not 16 <= len(secret) <= 4096:
        raise ConfigError(f"{path}: the secret in {setting} must have 16 to 4096 characters on one line")
    return secret

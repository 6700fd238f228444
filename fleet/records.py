"""The two kinds of models: what a person types (strict) and what we store (tolerant)."""

from pydantic import BaseModel, ConfigDict


class Typed(BaseModel):
    """Something a person types: unknown fields are refused, so that a misspelt one is an answer, not a surprise."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Record(BaseModel):
    """Something we store or send: unknown fields are ignored, so that an older or newer peer can read it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

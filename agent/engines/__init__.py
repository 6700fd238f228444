"""The engines llmgw can start, one small module each."""

from collections.abc import Mapping
from types import MappingProxyType

from agent.engines.adapter import Adapter
from agent.engines.llamacpp import LlamaCpp
from agent.engines.sglang import SgLang
from agent.engines.vllm import Vllm
from fleet.spec import Engine

ADAPTERS: Mapping[Engine, Adapter] = MappingProxyType(
    {Engine.LLAMACPP: LlamaCpp(), Engine.VLLM: Vllm(), Engine.SGLANG: SgLang()}
)

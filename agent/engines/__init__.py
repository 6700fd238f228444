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

LLAMACPP_PACKAGE = ADAPTERS[Engine.LLAMACPP].packages(ADAPTERS[Engine.LLAMACPP].tested_version, gpus=False)[0]
"""The requirement of the llama.cpp this llmgw was tested with."""

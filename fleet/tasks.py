"""What a model is for: told by its architecture, and what an engine must be told so that it does it."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from fleet.spec import Engine, Task

EMBEDDERS = frozenset(
    """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding
    """.split()  # noqa: SIM905 - a list of names reads better so
)
"""`general.architecture` of GGUF files that only embed: the names in llama.cpp's `src/llama-arch.cpp`."""

EMBEDDING_CLASSES = frozenset(
    """
    BertModel RobertaModel XLMRobertaModel NomicBertModel ModernBertModel GteModel GteNewModel
    SnowflakeGteModel Qwen2Model Qwen3Model LlamaModel MistralModel Gemma2Model Gemma3TextModel
    """.split()  # noqa: SIM905 - a list of names reads better so
)
"""`architectures` of config.json: those that vLLM serves as embedding models."""

_RANKS = re.compile(r"^(Bert|Roberta|XLMRoberta|ModernBert|Gte|GteNew|Qwen2|Qwen3)ForSequenceClassification$")

ARGUMENTS: Mapping[tuple[Engine, Task], tuple[str, ...]] = MappingProxyType(
    {
        (Engine.LLAMACPP, Task.EMBED): ("embedding=true",),
        (Engine.LLAMACPP, Task.RERANK): ("embedding=true", "pooling_type=4"),
        (Engine.VLLM, Task.EMBED): ("--runner=pooling",),
        (Engine.VLLM, Task.RERANK): ("--runner=pooling",),
        (Engine.SGLANG, Task.EMBED): ("--is-embedding",),
        (Engine.SGLANG, Task.RERANK): ("--is-embedding",),
    }
)
"""What an engine is started with for a task it does not do by itself. llama.cpp's 4 is its pooling for ranks."""


def task_of(architecture: str) -> Task:
    """What a model of this architecture is for."""
    if architecture in EMBEDDERS or architecture in EMBEDDING_CLASSES:
        return Task.EMBED
    return Task.RERANK if _RANKS.match(architecture) else Task.GENERATE


def task_arguments(engine: Engine, task: Task) -> tuple[str, ...]:
    """The engine's arguments for a task; an operator's own come after them and win."""
    return ARGUMENTS.get((engine, task), ())

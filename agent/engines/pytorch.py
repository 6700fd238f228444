"""The last words that vLLM and SGLang have in common: those of torch, transformers, safetensors and argparse."""

from agent.engines.adapter import patterns
from fleet.reasons import Reason

SHARED = patterns(
    (r"unrecognized arguments|error: argument |invalid choice", Reason.BAD_FLAG),
    (r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError", Reason.GPU_OUT_OF_MEMORY),
    (r"Cannot allocate memory|can't allocate memory|\bMemoryError", Reason.OUT_OF_MEMORY),
    (r"Model architectures .* are not supported|does not recognize this architecture", Reason.UNSUPPORTED_ARCHITECTURE),
    (r"SafetensorError|Error while deserializing header", Reason.WEIGHTS_CORRUPT),
    (r"Cannot find any model weights|does not appear to have a file named", Reason.WEIGHTS_MISSING),
    (r"No such file or directory: .*(safetensors|config\.json|tokenizer)", Reason.WEIGHTS_MISSING),
    (r"DistStoreError|DistNetworkError|clients joined|while trying to connect to \(", Reason.RENDEZVOUS),
    (r"Address already in use", Reason.PORT_IN_USE),
    (r"No module named", Reason.INSTALL_FAILED),
)
"""Rows of a diagnosis table; an engine puts its own before them."""

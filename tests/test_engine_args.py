"""Which arguments of a spec an engine does not get, in every form its parser would take them."""

import ast

import pytest

from agent.engines.llamacpp import LAUNCHER
from fleet.engine_args import FLAGS, SHOWN, refused_args
from fleet.spec import Engine

REFUSED = [
    (Engine.VLLM, "--port", "the node's agent.yaml says where its engines listen"),
    (Engine.VLLM, "--port=1", "the node's agent.yaml says where its engines listen"),
    (Engine.VLLM, "--po=1", "the node's agent.yaml says where its engines listen"),
    (Engine.VLLM, "--max_model_len=9", "say `context_length`"),
    (Engine.VLLM, "--max-model-l", "say `context_length`"),
    (Engine.VLLM, "-tp=2", "say `gpus`"),
    (Engine.VLLM, "-tp", "say `gpus`"),
    (Engine.VLLM, "-t", "say `gpus`"),
    (Engine.VLLM, "-n2", "llmgw brings the nodes of a replica together"),
    (Engine.VLLM, "--api-key", "a secret never stands on a command line"),
    (Engine.VLLM, "--api-k=secret", "a secret never stands on a command line"),
    (Engine.VLLM, "--config=/etc/args.yaml", "a file could hold any of those that llmgw sets"),
    (Engine.VLLM, "--trust-remote-code", "must both allow it"),
    (Engine.VLLM, "--trust", "must both allow it"),
    (Engine.VLLM, "--scheduler-cls", "other code than the engine's own"),
    (Engine.VLLM, "--gpu_memory_utilization=0.9", "say `memory`"),
    (Engine.VLLM, "--", "as something else than flags"),
    (Engine.VLLM, "-", "it is no flag"),
    (Engine.VLLM, "-h", "print its usage"),
    (Engine.VLLM, "--dtype=\0", "it holds a NUL"),
    (Engine.SGLANG, "--tp", "say `gpus`"),
    (Engine.SGLANG, "--tp-size=4", "say `gpus`"),
    (Engine.SGLANG, "--dist-init-addr=n1:5", "llmgw brings the nodes of a replica together"),
    (Engine.SGLANG, "--admin-api-key=x", "a secret never stands on a command line"),
    (Engine.SGLANG, "--mem-frac=0.9", "say `memory`"),
    (Engine.SGLANG, "--config", "write its arguments out"),
    (Engine.SGLANG, "--delete-ckpt-after-loading", "shared by all"),
    (Engine.LLAMACPP, "n_ctx=9", "say `context_length`"),
    (Engine.LLAMACPP, "--n-ctx=9", "say `context_length`"),
    (Engine.LLAMACPP, "model.path=/x", "the weights are those of `repo`"),
    (Engine.LLAMACPP, "api_keys=x", "a secret never stands on a command line"),
    (Engine.LLAMACPP, "flash", "write it as key=value"),
]


@pytest.mark.parametrize(("engine", "arg", "why"), REFUSED)
def test_refused(engine: Engine, arg: str, why: str) -> None:
    sentence = refused_args(engine, ("cache_prompt=true",) * (engine is Engine.LLAMACPP) + (arg,))
    assert sentence is not None
    assert sentence.startswith(f"{engine} does not take the argument {arg.partition('=')[0]!r}: ")
    assert "secret" not in sentence.partition(":")[0]
    assert why in sentence


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        (Engine.VLLM, ("--dtype", "half", "--seed=1", "-O3", "-cc.mode=3", "-dc", "{}", "-q", "awq")),
        (Engine.VLLM, ("--max-num-queued-reqs", "-1", "--watermark", "-.5e3", "--chat-template", "/x y")),
        (Engine.VLLM, ("--enable-prefix-caching", "--no-enable-prefix-caching", "--max-num-batched-tokens=1k")),
        (Engine.VLLM, ("--reasoning-parser", "qwen3")),
        (Engine.SGLANG, ("--dtype", "half", "--model-impl=auto", "--log-level-http", "error", "--tokenizer-mode=slow")),
        (Engine.LLAMACPP, ("n_batch=64", "--n-ubatch=64", "cpuparams.n_threads=4")),
        (Engine.LLAMACPP, ()),
    ],
)
def test_passed(engine: Engine, args: tuple[str, ...]) -> None:
    assert refused_args(engine, args) is None


def test_a_long_argument_is_cut_in_the_sentence() -> None:
    sentence = refused_args(Engine.VLLM, ("--port" + "9" * 100_000 + "\0",))
    assert sentence is not None
    assert len(sentence) < SHOWN + 200


def test_the_launcher_of_llamacpp_keeps_the_same_settings_shut() -> None:
    shut: set[str] = set()
    for node in ast.parse(LAUNCHER.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("OURS", "SHUT"):
            shut |= set(ast.literal_eval(node.value.args[0]))  # type: ignore[attr-defined]
    assert shut == set(FLAGS[Engine.LLAMACPP].shut)

"""Which model architectures each engine loads, by the name the weights give themselves."""

from collections.abc import Mapping

from fleet.spec import Engine, Format

FORMATS: Mapping[Engine, Format] = {
    Engine.LLAMACPP: Format.GGUF,
    Engine.VLLM: Format.SAFETENSORS,
    Engine.SGLANG: Format.SAFETENSORS,
}
"""What each engine reads. vLLM's own GGUF reader is experimental and slow, so it is not offered."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LLAMACPP = _names(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell
    cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 dots1 dream
    ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4
    glm4moe gpt-oss gpt2 gptj gptneox granite granitehybrid granitemoe grok grovemoe hunyuan-dense hunyuan-moe
    hunyuan_vl hy_v3 internlm2 jais jais2 jamba kimi-linear laguna lfm2 lfm2moe llada llada-moe llama llama4
    maincoder mamba mamba2 mellum mimo2 minicpm minicpm3 minimax-m2 mistral3 mistral4 mpt nemotron nemotron_h
    nemotron_h_moe olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm
    qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe refact rnd1 rwkv6
    rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 stablelm starcoder starcoder2 step35 t5 talkie xverse
    """
)
"""`general.architecture` of GGUF files: the names in llama.cpp's `src/llama-arch.cpp`, compared with those in the
library of xllamacpp 2026.10.11549, without those that only embed or decode audio."""

VLLM = _names(
    """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM ArcticForCausalLM BaiChuanForCausalLM BaichuanForCausalLM
    BailingMoeForCausalLM BailingMoeV2ForCausalLM BambaForCausalLM BloomForCausalLM ChatGLMModel CohereForCausalLM
    Cohere2ForCausalLM DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM
    DeepseekV3ForCausalLM DeepseekV32ForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneForCausalLM Exaone4ForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
    GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM
    GlmForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
    GPTNeoXForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM
    GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM InternLMForCausalLM
    InternLM2ForCausalLM InternLM3ForCausalLM InternVLChatModel JAISLMHeadModel Jais2ForCausalLM JambaForCausalLM
    KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM LlamaForCausalLM Llama4ForCausalLM
    Llama4ForConditionalGeneration LlavaForConditionalGeneration LongcatFlashForCausalLM MambaForCausalLM
    Mamba2ForCausalLM MiMoForCausalLM MiniCPMForCausalLM MiniCPM3ForCausalLM MiniMaxM1ForCausalLM
    MiniMaxM2ForCausalLM MiniMaxText01ForCausalLM MistralForCausalLM Mistral3ForConditionalGeneration
    MixtralForCausalLM MPTForCausalLM NemotronForCausalLM NemotronHForCausalLM OlmoForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoeForCausalLM OPTForCausalLM OrionForCausalLM PhiForCausalLM Phi3ForCausalLM
    Phi3VForCausalLM PhiMoEForCausalLM Plamo2ForCausalLM QWenLMHeadModel Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration SeedOssForCausalLM
    SmolLM3ForCausalLM SolarForCausalLM StableLmForCausalLM Starcoder2ForCausalLM Step3TextForCausalLM
    TeleChat2ForCausalLM XverseForCausalLM Zamba2ForCausalLM
    """
)
"""`architectures` of config.json: from vLLM's `vllm/model_executor/models/registry.py`, those that generate text.
SmolLM3 is served there by the Transformers backend."""

SGLANG = _names(
    """
    ApertusForCausalLM ArceeForCausalLM ArcticForCausalLM BaichuanForCausalLM BailingMoeForCausalLM
    BailingMoeV2ForCausalLM ChatGLMModel CohereForCausalLM Cohere2ForCausalLM DbrxForCausalLM DeepseekForCausalLM
    DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    ExaoneForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
    Glm4ForCausalLM Glm4MoeForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM InternLM2ForCausalLM KimiLinearForCausalLM LlamaForCausalLM Llama4ForCausalLM
    Llama4ForConditionalGeneration LlavaForConditionalGeneration LongcatFlashForCausalLM MiMoForCausalLM
    MiniCPMForCausalLM MiniCPM3ForCausalLM MiniMaxM2ForCausalLM MistralForCausalLM MixtralForCausalLM
    NemotronHForCausalLM OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM PhiForCausalLM Phi3ForCausalLM
    PhiMoEForCausalLM QWenLMHeadModel Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration
    Qwen2_5_VLForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration SolarForCausalLM StableLmForCausalLM
    Starcoder2ForCausalLM Step3VLForConditionalGeneration XverseForCausalLM
    """
)
"""`architectures` of config.json: the classes in SGLang's `python/sglang/srt/models` that generate text."""

ARCHITECTURES: Mapping[Engine, frozenset[str]] = {
    Engine.LLAMACPP: LLAMACPP,
    Engine.VLLM: VLLM,
    Engine.SGLANG: SGLANG,
}


def engine_for(format: Format) -> Engine:
    """The engine that serves a format where nobody chose one."""
    return Engine.LLAMACPP if format is Format.GGUF else Engine.VLLM

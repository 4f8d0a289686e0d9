"""The inputs of goldens: the families' classes in transformers, and tiny configs that use every one of their
options.
"""

import pathlib

import transformers
import yaml
from cases_of_states import STATES
from reference_models import (
    BaichuanConfig,
    BaichuanForCausalLM,
    BailingMoeConfig,
    BailingMoeForCausalLM,
    BailingMoeV2Config,
    BailingMoeV2ForCausalLM,
    ChatGLMConfig,
    ChatGLMForConditionalGeneration,
    MiMoConfig,
    MiMoForCausalLM,
    QwenConfig,
    QwenLMHeadModel,
)

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM),
    "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM),
    "gptj": (transformers.GPTJConfig, transformers.GPTJForCausalLM),
    "glm": (transformers.GlmConfig, transformers.GlmForCausalLM),
    "opt": (transformers.OPTConfig, transformers.OPTForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "bloom": (transformers.BloomConfig, transformers.BloomForCausalLM),
    "falcon": (transformers.FalconConfig, transformers.FalconForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
    "arcee": (transformers.ArceeConfig, transformers.ArceeForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "kimi_k2": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "bailing_hybrid": (transformers.BailingHybridConfig, transformers.BailingHybridForCausalLM),
    "kimi_linear": (transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "granitemoe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "hy_v3": (transformers.HYV3Config, transformers.HYV3ForCausalLM),
    "olmo": (transformers.OlmoConfig, transformers.OlmoForCausalLM),
    "nemotron": (transformers.NemotronConfig, transformers.NemotronForCausalLM),
    "granitemoeshared": (transformers.GraniteMoeSharedConfig, transformers.GraniteMoeSharedForCausalLM),
    "granite_swa": (transformers.GraniteSWAConfig, transformers.GraniteSWAForCausalLM),
    "granitemoe_swa": (transformers.GraniteMoeSWAConfig, transformers.GraniteMoeSWAForCausalLM),
    "youtu": (transformers.YoutuConfig, transformers.YoutuForCausalLM),
    "cwm": (transformers.CwmConfig, transformers.CwmForCausalLM),
    "jais2": (transformers.Jais2Config, transformers.Jais2ForCausalLM),
    "iquestcoder": (transformers.IQuestCoderConfig, transformers.LlamaForCausalLM),
    "hyperclovax": (transformers.HyperCLOVAXConfig, transformers.HyperCLOVAXForCausalLM),
    "vaultgemma": (transformers.VaultGemmaConfig, transformers.VaultGemmaForCausalLM),
    "helium": (transformers.HeliumConfig, transformers.HeliumForCausalLM),
    # Multimodal models, of which the text is tried.
    "gemma3": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration),
    "mistral3": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration),
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
    "glm4v": (transformers.Glm4vConfig, transformers.Glm4vForConditionalGeneration),
    "glm4v_moe": (transformers.Glm4vMoeConfig, transformers.Glm4vMoeForConditionalGeneration),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
    "hunyuan_v1_moe": (transformers.HunYuanMoEV1Config, transformers.HunYuanMoEV1ForCausalLM),
    "internlm3": (transformers.InternLM3Config, transformers.LlamaForCausalLM),
    "mellum": (transformers.MellumConfig, transformers.MellumForCausalLM),
    "apertus": (transformers.ApertusConfig, transformers.ApertusForCausalLM),
    "mimo": (MiMoConfig, MiMoForCausalLM),
    "qwen": (QwenConfig, QwenLMHeadModel),
    "chatglm": (ChatGLMConfig, ChatGLMForConditionalGeneration),
    "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "phimoe": (transformers.PhimoeConfig, transformers.PhimoeForCausalLM),
    "baichuan": (BaichuanConfig, BaichuanForCausalLM),
    "bailing_moe": (BailingMoeConfig, BailingMoeForCausalLM),
    "bailing_moe_v2": (BailingMoeV2Config, BailingMoeV2ForCausalLM),
    "olmo_hybrid": (transformers.OlmoHybridConfig, transformers.OlmoHybridForCausalLM),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "lfm2_moe": (transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
    "bamba": (transformers.BambaConfig, transformers.BambaForCausalLM),
    "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM),
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "mamba2": (transformers.Mamba2Config, transformers.Mamba2ForCausalLM),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "llama4_text": (transformers.Llama4TextConfig, transformers.Llama4ForCausalLM),
    "gemma3n_text": (transformers.Gemma3nTextConfig, transformers.Gemma3nForCausalLM),
    "gemma4": (transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration),
    "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "afmoe": (transformers.AfmoeConfig, transformers.AfmoeForCausalLM),
    "mistral4": (transformers.Mistral4Config, transformers.Mistral4ForCausalLM),
    "mimo_v2_flash": (transformers.MiMoV2FlashConfig, transformers.MiMoV2FlashForCausalLM),
    "laguna": (transformers.LagunaConfig, transformers.LagunaForCausalLM),
    "solar_open": (transformers.SolarOpenConfig, transformers.SolarOpenForCausalLM),
    "exaone_moe": (transformers.ExaoneMoeConfig, transformers.ExaoneMoeForCausalLM),
    "cohere2_moe": (transformers.Cohere2MoeConfig, transformers.Cohere2MoeForCausalLM),
}
HAVE_HEAD_DIM = {
    *("llama", "ministral", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "mixtral"),
    *("qwen3_moe", "gpt_oss", "arcee", "gemma3", "llama4_text", "gemma4", "gemma4_text", "glm4_moe", "hy_v3"),
    *("minimax_m2", "mistral3", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "ernie4_5", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "internlm3", "mellum", "qwen", "chatglm", "bailing_moe", "bailing_moe_v2", "ministral3"),
    *("nemotron", "cwm", "jais2", "bailing_hybrid", "iquestcoder", "hyperclovax", "vaultgemma"),
    *("falcon_h1", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma3n_text", "afmoe"),
    *("mimo_v2_flash", "laguna", "solar_open", "exaone_moe", "cohere2_moe"),
}
"""Families with a head_dim of their own; in others hidden_size is the heads' dimensions together."""
GPT_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
FIELD_NAMES = {
    "starcoder2": {"rms_norm_eps": "norm_epsilon"},
    "cohere": {"rms_norm_eps": "layer_norm_eps"},
    "nemotron": {"rms_norm_eps": "norm_eps"},
    "jais2": {"rms_norm_eps": "layer_norm_eps"},
    "cohere2": {"rms_norm_eps": "layer_norm_eps"},
    "cohere2_moe": {"rms_norm_eps": "layer_norm_eps"},
    "gpt2": GPT_NAMES,
    "gpt_neox": {"rms_norm_eps": "layer_norm_eps"},
    "phi": {"rms_norm_eps": "layer_norm_eps"},
    "stablelm": {"rms_norm_eps": "layer_norm_eps"},
    "gptj": GPT_NAMES,
    "opt": {"intermediate_size": "ffn_dim"},
    "bloom": {"rms_norm_eps": "layer_norm_epsilon"},
    "falcon": {"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "ffn_hidden_size"},
    "lfm2": {"rms_norm_eps": "norm_eps"},
    "lfm2_moe": {"rms_norm_eps": "norm_eps"},
    "nemotron_h": {"rms_norm_eps": "layer_norm_epsilon"},
    "mamba2": {"rms_norm_eps": "layer_norm_epsilon"},
    "qwen": {"rms_norm_eps": "layer_norm_epsilon", "head_dim": "kv_channels"},
    "chatglm": {
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layernorm_epsilon",
    },
}
"""A family's name of a field, if it is not the usual one."""
HAVE_NO_KV_HEADS = {"baichuan", "bloom", "falcon", "gpt2", "gpt_neox", "gptj", "mamba2", "opt", "qwen"}

_DECLARED = yaml.safe_load(pathlib.Path(__file__).with_name("cases.yaml").read_text())
CASES = _DECLARED["cases"] | STATES
"""All golden models."""
_FIRST_NUMBERS = {
    "llama_untied": 0,
    "seed_oss_untied": 72,
    "phimoe_short": 114,
    "qwen3_next_biases": 114,
    "gemma4_shared": 127,
    "lfm2_biases": 127,
    "bamba_biases": 141,
    "kimi_linear_latent_queries": 302,
    "kimi_linear_plain": 201,
}
"""Numbers of some cases; each other one has the number after that of the case before it."""


def _numbered():
    numbers, number = {}, 0
    for name in CASES:
        number = numbers[name] = _FIRST_NUMBERS.get(name, number)
        number += 1
    return numbers


NUMBERS = _numbered()
"""With a seed, the number of a case draws its golden."""
YARN = _DECLARED["shared"]["YARN"]
MXFP4 = {"gpt_oss_mxfp4"}
"""Goldens whose experts are stored as MXFP4."""

# A config's fields for rotary embedding, and the length of the text for which its base is computed.
ROPES = {
    "yarn": (YARN, None),
    "yarn_truncate": (YARN | {"truncate": False, "factor": 32.0, "beta_fast": 20.0, "beta_slow": 1.5}, None),
    "yarn_attention_factor": (YARN | {"attention_factor": 0.7, "mscale": 0.5, "mscale_all_dim": 0.7}, None),
    "yarn_mscale": (YARN | {"mscale": 1.3, "mscale_all_dim": 0.7}, None),
    "yarn_mscale_all_dim": (YARN | {"mscale": 0, "mscale_all_dim": 1.0}, None),
    "yarn_ratio_of_contexts": (YARN | {"factor": None}, None),
    "yarn_no_stretch": (YARN | {"factor": 1.0}, None),
    "yarn_tiny_context": (YARN | {"original_max_position_embeddings": 5}, None),
    "yarn_all_in_one_pair": (YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}, None),
    "dynamic_short": ({"rope_type": "dynamic", "factor": 2.0}, 100),
    "dynamic_long": ({"rope_type": "dynamic", "factor": 2.0}, 3000),
    "dynamic_at_the_end": ({"rope_type": "dynamic", "factor": 4.0}, 1024),
}

SHARDED = {"llama_untied", "qwen2_tied"}
"""Goldens whose weights are written as several files with an index."""

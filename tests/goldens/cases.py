"""The inputs of goldens: the families' classes in transformers, and tiny configs that use every one of their
options.
"""

import transformers
from cases_of_experts import EXPERTS, SHORT_YARN, YARN
from cases_of_hybrids import HYBRIDS
from cases_of_later_experts import LATER_EXPERTS, RENAMED, WRAPPED
from cases_of_later_families import LATER, MiMoConfig, MiMoForCausalLM
from cases_of_other_layers import ADDED, BLOOM_AND_FALCON, OTHER_LAYERS
from cases_of_shared_layers import SHARED_LAYERS
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
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "granitemoe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "hy_v3": (transformers.HYV3Config, transformers.HYV3ForCausalLM),
    # Multimodal models, of which the text is tried.
    "gemma3": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration),
    "mistral3": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration),
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
    "glm4v": (transformers.Glm4vConfig, transformers.Glm4vForConditionalGeneration),
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
    "gemma4": (transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration),
    "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
}
HAVE_HEAD_DIM = {
    "llama",
    "ministral",
    "mistral",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "arcee",
    "falcon_h1",
    "gemma3",
    "llama4_text",
    "gemma4",
    "gemma4_text",
    "glm4_moe",
    "hy_v3",
    "minimax_m2",
    "mistral3",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "ernie4_5",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internlm3",
    "mellum",
    "qwen",
    "chatglm",
    "bailing_moe",
    "bailing_moe_v2",
    "ministral3",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
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
    "cohere2": {"rms_norm_eps": "layer_norm_eps"},
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

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name: (family, (query heads, kv heads, head dim), the rest of the config)
LLAMAS = {
    "llama_untied": ("llama", (4, 4, 12), {}),
    "llama_tied_llama3_rope": ("llama", (6, 2, 8), {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_biases_linear_rope": (
        "llama",
        (4, 2, 20),
        {
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral_window": ("mistral", (4, 1, 24), {"sliding_window": 7}),
    "mistral_full": (
        "mistral",
        (5, 5, 6),
        {
            "tie_word_embeddings": True,
            "sliding_window": None,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "qwen2_tied": ("qwen2", (6, 3, 10), {"tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        (7, 1, 8),
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "hidden_act": "relu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
        },
    ),
    "qwen3_tied": ("qwen3", (4, 2, 16), {"tie_word_embeddings": True}),
    "qwen3_biases_window": (
        "qwen3",
        (6, 2, 10),
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_act": "gelu",
            "rope_parameters": SHORT_YARN,
        },
    ),
    "gemma_tied": ("gemma", (4, 1, 12), {"tie_word_embeddings": True}),
    "gemma_biases_relu": (
        "gemma",
        (4, 2, 10),
        {
            "attention_bias": True,
            "hidden_act": "relu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma2_caps": (
        "gemma2",
        (4, 2, 10),
        {
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "query_pre_attn_scalar": 23,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2_biases_no_caps": (
        "gemma2",
        (3, 1, 14),
        {
            "attention_bias": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "hidden_activation": "silu",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma3_two_thetas": (
        "gemma3_text",
        (4, 2, 8),
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 23,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "gemma3_biases_cap": (
        "gemma3_text",
        (3, 3, 10),
        {
            "attention_bias": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "final_logit_softcapping": 5.0,
            "hidden_activation": "gelu",
        },
    ),
    "phi3_fused": ("phi3", (6, 2, 8), {"tie_word_embeddings": True, "sliding_window": 11}),
    "phi3_long_factors": (
        "phi3",
        (3, 3, 12),
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.0, 2.5, 6.0],
            },
        },
    ),
    "phi3_short_factors": (
        "phi3",
        (4, 2, 8),
        {
            "hidden_act": "gelu",
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "attention_factor": 1.3,
                "short_factor": [1.0, 1.1, 1.3, 1.7],
                "long_factor": [1.0, 2.5, 6.0, 9.0],
            },
        },
    ),
    "granite_multipliers": (
        "granite",
        (4, 2, 10),
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
        },
    ),
    "granite_biases": (
        "granite",
        (3, 3, 12),
        {
            "mlp_bias": True,
            "attention_multiplier": 0.2,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "olmo2_untied": ("olmo2", (4, 2, 10), {}),
    "olmo2_tied_biases": (
        "olmo2",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "starcoder2_tied_window": ("starcoder2", (6, 2, 8), {"tie_word_embeddings": True, "sliding_window": 7}),
    "starcoder2_no_biases": (
        "starcoder2",
        (4, 1, 10),
        {
            "use_bias": False,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "cohere_qk_norm": (
        "cohere",
        (4, 2, 10),
        {"tie_word_embeddings": True, "use_qk_norm": True, "logit_scale": 0.6, "rope_parameters": {"rope_theta": 50.0}},
    ),
    "cohere_biases": ("cohere", (3, 3, 12), {"attention_bias": True, "logit_scale": 1.5, "hidden_act": "gelu"}),
    "glm4_biases": ("glm4", (4, 2, 12), {"hidden_act": "gelu"}),
    "glm4_tied": (
        "glm4",
        (6, 1, 8),
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.75},
        },
    ),
}
CASES = LLAMAS | OTHER_LAYERS | EXPERTS | BLOOM_AND_FALCON | ADDED | LATER_EXPERTS | WRAPPED | RENAMED | LATER | HYBRIDS
CASES |= SHARED_LAYERS
CASES |= STATES
"""All golden models. Those of a seed depend on their order."""
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

"""Golden models of families that came in 2026, see `cases.py`, and classes of those that are not in transformers."""

import transformers
from cases_of_experts import SHORT_YARN


class MiMoConfig(transformers.Qwen2Config):
    """That of MiMo's own code: Qwen 2's under another name. Layers that predict further tokens are not in goldens."""

    model_type = "mimo"


class MiMoForCausalLM(transformers.Qwen2ForCausalLM):
    config_class = MiMoConfig


# name: (family, (query heads, kv heads, head dim), the rest of the config)
LATER = {
    "seed_oss_untied": ("seed_oss", (4, 2, 10), {}),
    "seed_oss_biases": (
        "seed_oss",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "rope_parameters": SHORT_YARN,
        },
    ),
    "ernie4_5_untied": ("ernie4_5", (4, 2, 10), {}),
    "ernie4_5_biases": (
        "ernie4_5",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "use_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "hunyuan_v1_dense_alpha": (
        "hunyuan_v1_dense",
        (4, 2, 10),
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 7.0, "factor": 1.0},
        },
    ),
    "hunyuan_v1_dense_biases": ("hunyuan_v1_dense", (3, 1, 14), {"attention_bias": True, "hidden_act": "gelu"}),
    "mimo_window": (
        "mimo",
        (6, 2, 8),
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "mellum_windows": (
        "mellum",
        (4, 2, 10),
        {
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 22,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "rope_parameters": {
                "full_attention": SHORT_YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "mellum_biases": (
        "mellum",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "norm_topk_prob": False,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 18,
        },
    ),
    "apertus_llama3_rope": (
        "apertus",
        (4, 2, 10),
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "apertus_tied_biases": (
        "apertus",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        },
    ),
    "hunyuan_v1_moe_alpha": (
        "hunyuan_v1_moe",
        (4, 2, 10),
        {
            "num_experts": 5,
            "moe_topk": 2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 7.0, "factor": 1.0},
        },
    ),
    "hunyuan_v1_moe_tied_biases": (
        "hunyuan_v1_moe",
        (3, 1, 14),
        {"tie_word_embeddings": True, "attention_bias": True, "num_experts": 4, "moe_topk": [3, 3]},
    ),
    "internlm3_dynamic": (
        "internlm3",
        (4, 2, 10),
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 6.0}},
    ),
    "internlm3_tied_biases": (
        "internlm3",
        (3, 1, 14),
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    ),
    "qwen_untied": (
        "qwen",
        (4, 4, 10),
        {
            "intermediate_size": 74,
            "seq_length": 64,
            "no_bias": True,
            "rotary_emb_base": 50.0,
            "rotary_pct": 1.0,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
        },
    ),
    "qwen_biases": (
        "qwen",
        (3, 3, 14),
        {
            "intermediate_size": 62,
            "no_bias": False,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 1.0,
            "use_dynamic_ntk": False,
            "use_logn_attn": False,
        },
    ),
    "chatglm_grouped": (
        "chatglm",
        (4, 2, 12),
        {"add_bias_linear": False, "add_qkv_bias": True, "rope_ratio": 1.0, "multi_query_attention": True},
    ),
    "chatglm_biases": (
        "chatglm",
        (3, 1, 20),
        {"add_bias_linear": True, "add_qkv_bias": False, "rope_ratio": 0.005, "multi_query_attention": True},
    ),
    "phimoe_short": (
        "phimoe",
        (4, 2, 10),
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "intermediate_size": 13,
            "num_local_experts": 5,
            "router_jitter_noise": 0.4,
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0],
                "long_factor": [1.0, 2.5, 6.0, 9.0, 12.0],
                "short_mscale": 1.2,
                "long_mscale": 1.6,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    # Beyond the original context, transformers takes the short factors with the long scale, unlike Phi's own code.
    "phimoe_long_equal_factors": (
        "phimoe",
        (3, 3, 6),
        {
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "intermediate_size": 9,
            "num_local_experts": 4,
            "router_jitter_noise": 0.1,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 50.0,
                "short_factor": [1.0, 2.5, 6.0],
                "long_factor": [1.0, 2.5, 6.0],
                "short_mscale": 1.2,
                "long_mscale": 1.6,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "baichuan_rotated": ("baichuan", (3, 3, 10), {"norm_head": True, "hidden_act": "silu"}),
    "baichuan_alibi": (
        "baichuan",
        (4, 4, 7),
        {"norm_head": False, "hidden_act": "silu", "model_max_length": 512},
    ),
    "bailing_moe_unit_head": (
        "bailing_moe",
        (4, 2, 10),
        {
            "norm_head": True,
            "use_qkv_bias": True,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "norm_topk_prob": False,
            "rope_theta": 300.0,
        },
    ),
    "bailing_moe_v2_groups": (
        "bailing_moe_v2",
        (6, 3, 8),
        {
            "norm_head": False,
            "use_qkv_bias": False,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 11,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "partial_rotary_factor": 0.5,
            "rope_theta": 50.0,
        },
    ),
    "ministral3_beyond_original": (
        "ministral3",
        (4, 2, 10),
        {
            "sliding_window": 17,
            "rope_parameters": SHORT_YARN
            | {
                "original_max_position_embeddings": 7,
                "llama_4_scaling_beta": 0.7,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
"""The next ones go to the end: the order is part of the seeds."""

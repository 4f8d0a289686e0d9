"""Golden models with experts, or with latents as keys and values."""

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}

SHORT_YARN = YARN | {"original_max_position_embeddings": 16, "rope_theta": 300.0}
DEEPSEEK = {
    "vocab_size": 40,
    "intermediate_size": 12,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 6,
}

EXPERTS = {
    "mixtral_window": (
        "mixtral",
        (4, 2, 10),
        {"intermediate_size": 19, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "mixtral_tied": (
        "mixtral",
        (3, 3, 8),
        {
            "tie_word_embeddings": True,
            "intermediate_size": 26,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "qwen2_moe_tied": (
        "qwen2_moe",
        (4, 2, 10),
        {
            "tie_word_embeddings": True,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 14,
            "shared_expert_intermediate_size": 22,
        },
    ),
    "qwen2_moe_windows_some_dense": (
        "qwen2_moe",
        (3, 1, 12),
        {
            "num_hidden_layers": 4,
            "intermediate_size": 21,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 18,
            "shared_expert_intermediate_size": 13,
        },
    ),
    "qwen3_moe_normalised": (
        "qwen3_moe",
        (4, 2, 10),
        {
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
        },
    ),
    "qwen3_moe_biases_window_some_dense": (
        "qwen3_moe",
        (6, 3, 8),
        {
            "num_hidden_layers": 4,
            "intermediate_size": 22,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 17,
        },
    ),
    "gpt_oss_clamped": (
        "gpt_oss",
        (4, 2, 8),
        {
            "hidden_size": 26,
            "intermediate_size": 11,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.8,
            "rope_parameters": YARN | {"original_max_position_embeddings": 16, "truncate": False, "rope_theta": 300.0},
        },
    ),
    "gpt_oss_mxfp4": (
        "gpt_oss",
        (4, 1, 12),
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        (4, 4, 4),
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "q_lora_rank": 7,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": SHORT_YARN | {"mscale": 0.9, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2_greedy": (
        "deepseek_v2",
        (3, 3, 5),
        DEEPSEEK
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "deepseek_v3_groups": (
        "deepseek_v3",
        (4, 4, 4),
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "q_lora_rank": 7,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": SHORT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        (3, 3, 5),
        DEEPSEEK
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
}

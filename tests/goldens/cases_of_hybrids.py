"""Goldens of models in which layers with a state alternate with layers that attend."""

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
    "linear_conv_kernel_dim": 4,
}
EXPERTS_OF_NEXT = {
    "moe_intermediate_size": 11,
    "shared_expert_intermediate_size": 13,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}

MROPE = {"rope_type": "default", "rope_theta": 500.0}
VISION = {
    "depth": 1,
    "num_heads": 1,
    "patch_size": 2,
    "intermediate_size": 4,
    "in_channels": 3,
    "hidden_size": 8,
    "out_hidden_size": 40,
    "num_position_embeddings": 4,
}

# name: (family, (query heads, kv heads, head dim), the rest of the config)
HYBRIDS = {
    "qwen3_next_biases": (
        "qwen3_next",
        (4, 2, 12),
        DELTA
        | EXPERTS_OF_NEXT
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "mlp_only_layers": [2],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next_tied": (
        "qwen3_next",
        (3, 1, 16),
        EXPERTS_OF_NEXT
        | {
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "full_attention_interval": 2,
            "norm_topk_prob": False,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 5,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5_biases": (
        "qwen3_5",
        (4, 2, 12),
        DELTA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
        },
        {"tie_word_embeddings": False, "vision_config": VISION},
    ),
    "qwen3_5_moe_tied": (
        "qwen3_5_moe",
        (4, 1, 16),
        DELTA
        | EXPERTS_OF_NEXT
        | {
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
        },
        {"tie_word_embeddings": True, "vision_config": VISION},
    ),
    "olmo_hybrid_biases": (
        "olmo_hybrid",
        (4, 2, 10),
        DELTA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "olmo_hybrid_unrotated": (
        "olmo_hybrid",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
}

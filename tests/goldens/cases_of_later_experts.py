"""Tiny configurations of families with experts that were added later, and of multimodal models, whose text they are."""

from cases_of_experts import DEEPSEEK, SHORT_YARN

HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
SIGMOID = {"moe_intermediate_size": 11, "n_routed_experts": 6, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7}

LATER_EXPERTS = {
    "glm4_moe_qk_norm": (
        "glm4_moe",
        (4, 2, 12),
        SIGMOID | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2, "rope_parameters": HALF},
    ),
    "glm4_moe_groups": (
        "glm4_moe",
        (6, 3, 8),
        SIGMOID
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "first_k_dense_replace": 0,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "rope_parameters": SHORT_YARN | {"partial_rotary_factor": 0.75},
        },
    ),
    "minimax_m2_half_rotated": (
        "minimax_m2",
        (4, 2, 12),
        {"intermediate_size": 13, "num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": HALF},
    ),
    "minimax_m2_tied": (
        "minimax_m2",
        (6, 1, 8),
        {
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "intermediate_size": 13,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
        },
    ),
    "glm4_moe_lite_dense_last": (
        "glm4_moe_lite",
        (4, 4, 4),
        DEEPSEEK
        | {
            "attention_bias": True,
            "q_lora_rank": 7,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": SHORT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "ernie4_5_moe_biases": (
        "ernie4_5_moe",
        (4, 2, 10),
        {
            "use_bias": True,
            "moe_intermediate_size": 11,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "ernie4_5_moe_tied": (
        "ernie4_5_moe",
        (3, 1, 14),
        {
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "moe_intermediate_size": 9,
            "moe_num_experts": 4,
            "moe_k": 3,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
        },
    ),
    "olmoe_biases": (
        "olmoe",
        (4, 2, 10),
        {
            "attention_bias": True,
            "intermediate_size": 13,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "olmoe_tied": (
        "olmoe",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "intermediate_size": 9,
            "num_experts": 6,
            "num_experts_per_tok": 4,
        },
    ),
    "granitemoe_multipliers": (
        "granitemoe",
        (4, 2, 10),
        {
            "attention_bias": True,
            "intermediate_size": 13,
            "num_local_experts": 5,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
        },
    ),
    "granitemoe_tied": (
        "granitemoe",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "intermediate_size": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.2,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "dots1_windows": (
        "dots1",
        (4, 2, 10),
        SIGMOID
        | {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "n_group": 2,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "dots1_tied": (
        "dots1",
        (3, 1, 14),
        SIGMOID
        | {
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "n_shared_experts": 1,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "hy_v3_biases": (
        "hy_v3",
        (4, 2, 12),
        {
            "attention_bias": True,
            "mlp_bias": True,
            "moe_intermediate_size": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.7,
        },
    ),
    "hy_v3_tied": (
        "hy_v3",
        (3, 1, 10),
        {
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "moe_intermediate_size": 9,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["sparse", "dense"],
            "rope_parameters": SHORT_YARN,
        },
    ),
}

VISION = {"hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 2}
PIXTRAL = VISION | {"model_type": "pixtral", "image_size": 4, "head_dim": 8}
QWEN_VISION = {"depth": 1, "num_heads": 1, "patch_size": 2, "intermediate_size": 4, "in_channels": 3}

# name: (family, (query heads, kv heads, head dim), the rest of the text's config, the rest of the whole config)
WRAPPED = {
    "gemma3_windows": (
        "gemma3",
        (4, 2, 8),
        {
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 23,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        {
            "tie_word_embeddings": True,
            "mm_tokens_per_image": 1,
            "vision_config": VISION | {"model_type": "siglip_vision_model", "image_size": 4},
        },
    ),
    "mistral3_window": (
        "mistral3",
        (4, 2, 12),
        {"model_type": "mistral", "sliding_window": 7},
        {"tie_word_embeddings": False, "vision_config": PIXTRAL},
    ),
    "qwen2_vl_tied": (
        "qwen2_vl",
        (4, 2, 12),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]}},
        {"tie_word_embeddings": True, "vision_config": QWEN_VISION | {"embed_dim": 8, "hidden_size": 48}},
    ),
    "qwen2_5_vl_window": (
        "qwen2_5_vl",
        (4, 2, 12),
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]},
        },
        {"vision_config": QWEN_VISION | {"hidden_size": 8, "out_hidden_size": 48, "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl_biases": (
        "qwen3_vl",
        (4, 2, 12),
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]},
        },
        {
            "vision_config": QWEN_VISION
            | {
                "hidden_size": 8,
                "out_hidden_size": 40,
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [0],
            }
        },
    ),
    "qwen3_vl_moe_some_dense": (
        "qwen3_vl_moe",
        (4, 2, 12),
        {
            "num_hidden_layers": 2,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]},
        },
        {
            "vision_config": QWEN_VISION
            | {
                "hidden_size": 8,
                "out_hidden_size": 40,
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [0],
            }
        },
    ),
    "glm4v_half_rotated": (
        "glm4v",
        (4, 2, 12),
        {"rope_parameters": HALF | {"mrope_section": [1, 1, 1]}},
        {"vision_config": QWEN_VISION | {"hidden_size": 8, "out_hidden_size": 8, "image_size": 4}},
    ),
}
"""Multimodal models."""

RENAMED = {
    "kimi_k2_one_group": (
        "kimi_k2",
        (4, 4, 4),
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "q_lora_rank": 7,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": SHORT_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}
"""Families that transformers has under another name."""

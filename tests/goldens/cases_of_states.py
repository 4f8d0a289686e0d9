"""Goldens of models with short convolutions and with Mamba-2."""

MAMBA = {"ssm_state_size": 7, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 3, "conv_kernel": 3}

# name: (family, (query heads, kv heads, head dim), the rest of the config)
STATES = {
    "lfm2_biases": (
        "lfm2",
        (4, 2, 10),
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "lfm2_tied": (
        "lfm2",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "full_attn_idxs": [1],
            "block_multiple_of": 7,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "lfm2_moe_biases": (
        "lfm2_moe",
        (4, 2, 10),
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "num_dense_layers": 1,
            "moe_intermediate_size": 11,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm2_moe_tied": (
        "lfm2_moe",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "conv"],
            "num_dense_layers": 0,
            "moe_intermediate_size": 13,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
    ),
    "nemotron_h_biases": (
        "nemotron_h",
        (4, 2, 10),
        MAMBA
        | {
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "nemotron_h_experts": (
        "nemotron_h",
        (3, 1, 14),
        MAMBA
        | {
            "n_groups": 1,
            "use_conv_bias": False,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 13,
            "moe_shared_expert_intermediate_size": 17,
            "moe_latent_size": 9,
            "routed_scaling_factor": 1.7,
            "mlp_bias": True,
            "mlp_hidden_act": "silu",
        },
    ),
    "mamba2_limits": (
        "mamba2",
        (4, 4, 10),
        {
            "num_heads": 8,
            "head_dim": 10,
            "n_groups": 4,
            "state_size": 7,
            "conv_kernel": 3,
            "use_bias": True,
            "time_step_limit": [0.3, 0.9],
        },
    ),
    "mamba2_tied": (
        "mamba2",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "num_heads": 3,
            "head_dim": 14,
            "expand": 1,
            "n_groups": 1,
            "state_size": 9,
            "use_conv_bias": False,
            "hidden_act": "gelu",
        },
    ),
    "granitemoehybrid_experts": (
        "granitemoehybrid",
        (4, 2, 10),
        {
            "layer_types": ["linear_attention", "full_attention"],
            "attention_bias": True,
            "mamba_n_heads": 8,
            "mamba_d_head": 10,
            "mamba_d_state": 7,
            "mamba_proj_bias": True,
            "num_local_experts": 5,
            "shared_intermediate_size": 13,
            "embedding_multiplier": 1.7,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
        },
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 9,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "num_local_experts": 0,
            "shared_intermediate_size": 37,
            "time_step_limit": [0.3, 0.9],
        },
    ),
}

"""Golden models whose layers differ from Llama's: norms, positions, biases, attention beside the feed-forward."""

OTHER_LAYERS = {
    "gpt2_tied": ("gpt2", (4, 4, 7), {"tie_word_embeddings": True, "n_positions": 64}),
    "gpt2_scales": (
        "gpt2",
        (3, 3, 10),
        {
            "n_positions": 64,
            "n_inner": None,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
    ),
    "gpt_neox_parallel": ("gpt_neox", (3, 3, 16), {}),
    "gpt_neox_sequential": (
        "gpt_neox",
        (4, 4, 9),
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi_untied": ("phi", (4, 2, 12), {}),
    "phi_tied_qk_norm": (
        "phi",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "qk_layernorm": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.3},
        },
    ),
    "stablelm_qk_norm": ("stablelm", (4, 2, 8), {"tie_word_embeddings": True, "qk_layernorm": True}),
    "stablelm_parallel_biases": (
        "stablelm",
        (3, 1, 12),
        {
            "use_qkv_bias": True,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gptj_untied": ("gptj", (4, 4, 10), {"rotary_dim": 6, "n_positions": 64}),
    "gptj_tied": (
        "gptj",
        (3, 3, 8),
        {"tie_word_embeddings": True, "rotary_dim": 8, "n_inner": None, "activation_function": "gelu"},
    ),
    "glm_biases": ("glm", (4, 2, 12), {}),
    "glm_tied": (
        "glm",
        (6, 1, 8),
        {
            "tie_word_embeddings": True,
            "attention_bias": False,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.75},
        },
    ),
    "opt_tied": ("opt", (4, 4, 9), {"tie_word_embeddings": True, "max_position_embeddings": 64}),
    "opt_norm_after_projected": (
        "opt",
        (3, 3, 12),
        {
            "max_position_embeddings": 64,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 20,
            "activation_function": "gelu",
        },
    ),
    "opt_without_final_norm": (
        "opt",
        (3, 3, 10),
        {
            "max_position_embeddings": 64,
            "_remove_final_layer_norm": True,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
    ),
}

BLOOM_AND_FALCON = {
    "bloom_tied": ("bloom", (3, 3, 4), {"vocab_size": 43, "tie_word_embeddings": True, "seq_length": 64}),
    "bloom_normed_residual": (
        "bloom",
        (6, 6, 3),
        {
            "vocab_size": 41,
            "num_hidden_layers": 1,
            "apply_residual_connection_post_layernorm": True,
            "slow_but_exact": True,
        },
    ),
    "falcon_multi_query": ("falcon", (5, 1, 4), {"vocab_size": 45, "tie_word_embeddings": True}),
    "falcon_grouped": (
        "falcon",
        (4, 2, 6),
        {
            "vocab_size": 41,
            "num_hidden_layers": 1,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
        },
    ),
    "falcon_grouped_one_norm": (
        "falcon",
        (6, 2, 4),
        {
            "vocab_size": 42,
            "num_hidden_layers": 1,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "parallel_attn": True,
            "ffn_hidden_size": None,
            "activation": "relu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
        },
    ),
    # With such heads all products of slopes and positions are exact in bfloat16, to which transformers rounds them. Its
    # eager attention adds the biases twice.
    "falcon_alibi": (
        "falcon",
        (6, 6, 3),
        {
            "vocab_size": 44,
            "num_hidden_layers": 1,
            "attn_implementation": "sdpa",
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
        },
    ),
}

ADDED = {
    "olmo3_windows_yarn": (
        "olmo3",
        (4, 2, 10),
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "olmo3_tied_biases": (
        "olmo3",
        (3, 3, 14),
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    ),
    "ministral_windows_by_layer": (
        "ministral",
        (4, 2, 10),
        {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "smollm3_untied_biases": (
        "smollm3",
        (4, 2, 10),
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [0, 1],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "smollm3_windows": (
        "smollm3",
        (3, 1, 14),
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 3},
    ),
    "cohere2_windows": ("cohere2", (4, 2, 10), {"sliding_window": 7, "sliding_window_pattern": 2, "logit_scale": 1.0}),
    "cohere2_untied_biases": (
        "cohere2",
        (3, 3, 14),
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "logit_scale": 1.5,
            "hidden_act": "gelu",
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "exaone4_windows": (
        "exaone4",
        (4, 2, 10),
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4_tied_full": (
        "exaone4",
        (3, 1, 14),
        {
            "tie_word_embeddings": True,
            "sliding_window": None,
            "layer_types": ["full_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "arcee_untied": ("arcee", (4, 2, 10), {}),
    "arcee_biases": ("arcee", (3, 3, 14), {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
}
"""Golden models of families that were added later. The next ones go to the end: the order is part of the seeds."""

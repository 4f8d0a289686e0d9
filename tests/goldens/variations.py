"""What a model directory may say: for each field that transformers reads, other values of it. No torch.

`make_variations.py` has transformers read each of them (`variations.json`); `tests/models/test_variations.py` compares.
A row is a set of changes to one file. A field that transformers begins to read is added here: the script names it. For
another file, add a table as GENERATION is, what transformers does with it to the script, and a test that compares.
"""

ABSENT = object()
"""In a row: the field is left out."""

FLAGS = (True, False, None)
EPSILONS = (0.3, None)
FACTORS = (0.37, None)
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "no_such", None)
WINDOWS = (5, 0, None)
IF_ABSENT = 2
"""Values that are tried of a field that a config does not have; null says the same as its absence."""
IF_THERE = (
    *("linear_", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "hidden_size_per_layer_input"),
    *("vocab_size_per_layer_input", "num_kv_shared_layers", "top_k_experts", "intermediate_size_mlp", "moe_layers"),
    *("short_conv_", "layer_group_size", "kda_", "moe_renormalize", "num_expert_group", "num_experts_per_token"),
    *("attn_temperature_tuning", "floor_scale", "attn_scale", "altup_", "laurel_rank", "activation_sparsity_pattern"),
    *("layer_rope_theta", "use_post_norm"),
    *(
        "global_attn_every_n_layers",
        "mup_enabled",
        "route_scale",
        "attention_value_scale",
        "gating",
        "moe_router_logit",
    ),
    *("num_attention_heads_per_layer", "moe_routed_scaling_factor", "moe_apply_router", "prefix_dense_", "expert_sel"),
    *("shared_expert_combination_strategy",),
)
"""Fields whose names begin like this are tried only where a config has them."""
SIZES = (0.5, 2)
"""Factors of a size that the model has."""

OF_STATES = {
    **dict.fromkeys(
        (
            *("conv_bias", "block_auto_adjust_ff_dim", "use_expert_bias", "mamba_proj_bias", "mamba_conv_bias"),
            *("use_conv_bias", "residual_in_fp32", "use_mamba_kernels"),
            *("moe_shared_expert_overlap", "mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"),
        ),
        FLAGS,
    ),
    **dict.fromkeys(
        (
            *("conv_L_cache", "block_multiple_of", "num_dense_layers", "conv_kernel", "n_groups", "state_size"),
            *("mamba_num_heads", "mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "mamba_expand", "expand"),
        ),
        (1, 2, 4, None),
    ),
    **dict.fromkeys(
        (
            "ssm_state_size",
            "mamba_head_dim",
            "mamba_d_head",
            "mamba_d_state",
            "shared_intermediate_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
        ),
        (("times", 2), None),
    ),
    **dict.fromkeys(("mamba_hidden_act", "mlp_hidden_act"), ("gelu", "relu2", "no_such", None)),
    # Limits that no step of these models reaches.
    **dict.fromkeys(("time_step_min", "time_step_floor"), (1e-4, None)),
    **dict.fromkeys(("time_step_max", "time_step_rank"), (3, None)),
    "time_step_limit": ([0.0, 1e6], None),
    "layers_block_type": (["mamba", "moe", "attention", "moe"], ["attention", "moe", "mamba", "moe"], None),
    "mtp_layers_block_type": (["full_attention"], None),
    "block_ffn_dim_multiplier": FACTORS,
    "full_attn_idxs": ([0], [1], [0, 1], None),
    "attn_layer_indices": ([0], [1], [0, 1], None),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), (5, None)),
    **dict.fromkeys(("num_logits_to_keep", "z_loss_coefficient"), (2, None)),
    **dict.fromkeys(
        (
            *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "lm_head_multiplier"),
            *("ssm_in_multiplier", "ssm_out_multiplier"),
        ),
        FACTORS,
    ),
    "mlp_multipliers": ([0.37, 1.9], [1.0], None),
    "ssm_multipliers": ([0.37, 1.9, 0.6, 1.3, 0.5], [1.0, 2.0], None),
    "mamba_d_ssm": (("times", 2), None),
    "position_embedding_type": ("rope", "nope", None),
    "mamba_ssm_cache_dtype": ("bfloat16", None),
    # With true, transformers 5.24 draws weights of Mamba-2 anew after it has loaded them.
    "rescale_prenorm_residual": (False, None),
}
"""Fields of families with states, tried only where a config has them."""

FIELDS = OF_STATES | {
    "kda_lower_bound": (-1.5, None),
    **dict.fromkeys(
        (
            *("alibi", "apply_residual_connection_post_layernorm", "attention_bias", "bias", "do_layer_norm_before"),
            *("enable_bias", "layer_norm_elementwise_affine", "mlp_bias", "multi_query", "new_decoder_architecture"),
            *("norm_topk_prob", "moe_renormalize", "parallel_attn", "qk_layernorm", "qkv_bias"),
            *(
                "reorder_and_upcast_attn",
                "rope_interleave",
                "scale_attn_by_inverse_layer_idx",
                "scale_attn_weights",
                "slow_but_exact",
            ),
            *("tie_word_embeddings", "use_bias", "use_bidirectional_attention", "use_cache", "use_parallel_residual"),
            *("use_qk_norm", "use_qkv_bias", "use_sliding_window", "_remove_final_layer_norm", "is_causal"),
            *("is_decoder", "is_encoder_decoder", "add_cross_attention", "output_attentions", "output_hidden_states"),
            *("output_router_logits", "return_dict", "gradient_checkpointing", "use_mrope", "no_bias", "qkv_clip"),
            *("enable_moe_fp32_combine", "attention_out_bias", "lm_head_bias"),
            *("linear_allow_neg_eigval", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
            *("attn_temperature_tuning", "altup_correct_scale", "mup_enabled", "moe_apply_router_weight_on_input"),
            *("use_post_norm", "kda_safe_gate"),
        ),
        FLAGS,
    ),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), EPSILONS),
    **dict.fromkeys(
        (
            *("attention_multiplier", "attn_logit_softcapping", "embedding_multiplier", "final_logit_softcapping"),
            *("logit_scale", "logits_scaling", "query_pre_attn_scalar", "residual_multiplier", "routed_scaling_factor"),
            *("swiglu_alpha", "swiglu_limit", "router_jitter_noise", "router_aux_loss_coef", "initializer_range"),
            *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
            *("init_std", "scale_emb", "scale_depth", "mup_base_width", "dim_model_base", "attention_scale"),
            *("router_scaling_factor", "moe_norm_min", "input_jitter_noise", "clip_qkv", "attn_scale"),
            *("route_scale", "attention_value_scale", "moe_routed_scaling_factor", "moe_router_logit_softcapping"),
        ),
        FACTORS,
    ),
    **dict.fromkeys(
        (
            *("attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "embedding_dropout"),
            *("hidden_dropout", "layerdrop", "resid_pdrop", "residual_dropout", "activation_dropout"),
        ),
        (0.4, None),
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation", "activation_function"), ACTIVATIONS),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOWS),
    **dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "n_embd", "head_dim"),
            *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"),
            *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "linear_num_heads"),
            *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "intermediate_size_mlp"),
            *("moe_intermediate_size", "shared_expert_intermediate_size", "word_embed_proj_dim", "vocab_size"),
        ),
        (*(("times", factor) for factor in SIZES), None),
    ),
    **dict.fromkeys(
        (
            *("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads"),
            *("num_heads", "n_head_kv", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
            *("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "max_window_layers"),
            *("num_expert_group", "num_experts_per_token"),
            *("decoder_sparse_step", "moe_layer_freq", "num_ln_in_parallel_attn", "pretraining_tp", "rotary_dim"),
            *("sliding_window_pattern", "_sliding_window_pattern", "num_mtp_layers", "num_nextn_predict_layers"),
            *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
            *("short_conv_kernel_size", "layer_group_size"),
            *("no_rope_layer_interval", "chunk_size_feed_forward", "num_labels", "interleave_moe_layer_step"),
            *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_num_shared_experts"),
            *("num_shared_experts", "moe_topk", "num_kv_shared_layers", "top_k_experts", "floor_scale"),
            *("global_attn_every_n_layers", "prefix_dense_sliding_window_pattern"),
        ),
        (1, 2, 4, None),
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "seq_length", "original_max_position_embeddings"), (64, 1024, None)
    ),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "default_theta"), (77.0, None)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0.5, 1.0, None)),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"), (3, None)),
    **dict.fromkeys(
        ("layer_types", "mtp_layer_types"),
        (
            ("by layer", "sliding_attention", "full_attention"),
            ("by layer", "full_attention", "sliding_attention"),
            ("by layer", "full_attention", "full_attention"),
            ("by layer", "sliding_attention", "sliding_attention"),
            ("by layer", "chunked_attention", "full_attention"),
            ("by layer", "attention", "attention"),
            ("by layer", "linear_attention", "full_attention"),
            None,
        ),
    ),
    **dict.fromkeys(
        ("mlp_layer_types", "mtp_mlp_layer_types"),
        (("by layer", "dense", "sparse"), ("by layer", "sparse", "sparse"), None),
    ),
    "dtype": ("bfloat16", None),
    "gating": ("per-head", "per-element", False, None),
    "num_attention_heads_per_layer": (("by layer", 6, 4), [4], None),
    "expert_selection_fn": ("softmax", "sigmoid", "no_such", None),
    "shared_expert_combination_strategy": ("sum", "average", "no_such", None),
    "prefix_dense_intermediate_size": (("times", 2), None),
    "altup_active_idx": (0, 2, 5, -1, None),
    "altup_num_inputs": (1, 2, 5, None),
    "altup_coef_clip": FACTORS,
    "laurel_rank": (("times", 2), None),
    "activation_sparsity_pattern": (("by layer", 0.5, 0.0), [0.5], 0.5, None),
    "no_rope_layers": (("by layer", 0, 1), None),
    "layer_rope_theta": (("by layer", 77.0, 0), ("by layer", 0, 0), [77.0], None),
    "moe_layers": ([0], [1], [], None),
    "mlp_only_layers": ([0], [1], [], None),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc", None),
    "scoring_func": ("softmax", "sigmoid", None),
    "aux_loss_alpha": (0.4,),
    "seq_aux": FLAGS,
    "per_layer_config": ({"0": {"intermediate_size": 8}}, {}, None),
    "pruned_heads": ({"0": [0]}, {}, None),
    "text_config": ({"hidden_size": 8}, None),
    "quantization_config": ({}, None),
    "transformers_weights": ("other.safetensors", None),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_theta": 77.0},
        {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 77.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 77.0, "factor": 3.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "rope_theta": 77.0, "factor": 3.0},
        {
            "rope_type": "yarn",
            "rope_theta": 77.0,
            "factor": 3.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.4,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 77.0,
            "factor": 3.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 0.8,
            "beta_fast": 20,
            "beta_slow": 2,
            "truncate": False,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 77.0,
            "factor": 3.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 77.0,
            "factor": 3.0,
            "short_factor": [1.0, 2.0],
            "long_factor": [1.0, 3.0],
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "proportional", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 77.0, "llama_4_scaling_beta": 0.1},
        {"rope_type": "default", "rope_theta": 77.0, "attention_factor": 0.8},
        {"rope_type": "default", "rope_theta": 77.0, "mrope_section": [1, 1, 2]},
        {"full_attention": {"rope_type": "default", "rope_theta": 77.0}},
        {
            "full_attention": {"rope_type": "default", "rope_theta": 77.0},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 55.0, "factor": 2.0},
        },
        None,
    ),
    "rope_scaling": (
        {"type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 3.0},
        {"type": "dynamic", "factor": 3.0},
        {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32},
        {"type": "su", "short_factor": [1.0, 2.0], "long_factor": [1.0, 3.0]},
        {"type": "mrope", "mrope_section": [1, 1, 2]},
        {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]},
        {"rope_type": "no_such", "factor": 3.0},
        None,
    ),
}
"""Other values of each field of config.json, whatever family has it: a field that one family reads and another does not
is tried in both. ("times", x) is x times the model's own size, ("by layer", a, b) a list of a and b in turn.
"""
OLD_ROPES = (
    {"rope_theta": 77.0},
    {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_theta": 77.0, "rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}},
    {"rope_theta": 77.0, "partial_rotary_factor": 0.5},
    {"rotary_emb_base": 77.0, "rotary_pct": 0.5},
    {"rope_theta": 77.0, "rope_local_base_freq": 55.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_theta": 77.0, "original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 3.0}},
)
"""Rotations as config.json had them before transformers 5: there is no rope_parameters then."""

GENERATION = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.4,
    "min_p": 0.3,
    "repetition_penalty": 1.7,
    "max_new_tokens": 3,
    "eos_token_id": [*range(0, 100, 2)],
    "do_sample": False,
    "max_length": 30,
    "min_length": 30,
    "min_new_tokens": 4,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 1.7,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "top_h": 0.4,
    "bad_words_ids": [[7], [8, 9]],
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [7, 8],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 5,
    "exponential_decay_length_penalty": [1, 1.5],
    "sequence_bias": [[[7], 5.0]],
    "guidance_scale": 1.5,
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "length_penalty": 0.5,
    "early_stopping": True,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"},
    "token_healing": True,
    "use_cache": False,
    "low_memory": True,
    "bos_token_id": 3,
    "pad_token_id": 3,
    "decoder_start_token_id": 3,
}
"""A value of each field of generation_config.json that may change what is drawn, and of some that do not."""
DRAWN = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "eos_token_id": 5}
"""The generation_config.json to which these are added."""


def rows(fields):
    """Return the changes to a config.json of these fields by a label: the field, and which of its values.

    ABSENT ones are left out.
    """
    changes = {}
    for name, values in FIELDS.items():
        if (name in OF_STATES or name.startswith(IF_THERE)) and name not in fields:
            continue
        given = values if name in fields else [each for each in values if each is not None][:IF_ABSENT]
        for index, each in enumerate(given):
            value = _value(each, fields.get(name), fields)
            if value is not ABSENT and (name not in fields or fields[name] != value):
                changes[f"{name} {index}"] = {name: value}
        if name in fields:
            changes[f"{name} absent"] = {name: ABSENT}
    for index, old in enumerate(OLD_ROPES):
        changes[f"old rope {index}"] = {"rope_parameters": ABSENT} | old
    return changes


def _value(given, own, fields):
    if not isinstance(given, tuple):
        return given
    kind, *rest = given
    if kind == "times":
        return max(1, int(own * rest[0])) if isinstance(own, int) else ABSENT
    layers = next((fields[name] for name in ("num_hidden_layers", "n_layer") if name in fields), 1)
    return [rest[index % len(rest)] for index in range(layers)]


def changed(fields, change):
    """Return fields with the changes of a row."""
    merged = fields | change
    return {name: value for name, value in merged.items() if value is not ABSENT}

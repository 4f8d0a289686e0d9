"""The largest numbers that a checkpoint's config may hold, so that a nonsensical one fails at once. No jax.

They are several times those of the largest published models. Host work and memory of a start grow with these numbers: a
config is read, and its weights are listed, before it is known if the weights exist.
"""

MAX_NUMBER = 1e18
"""Limit of any number in a config, whatever it means."""
MIN_FLOAT, MAX_FLOAT = 2.0**-126, 1e15
"""Range of numbers that are not sizes: normal float32 numbers that can still be squared."""
MAX_INTEGER = 2**31 - 1
"""Limit of integers: positions, ids and sizes are int32 on the device."""
MAX_CONTEXT = 2**24
"""Limit of positions: 16 million; published models support 10 million at most."""
MAX_LAYERS = 2**10
MAX_HEADS = 2**10
MAX_WIDTH = 2**20
MAX_STREAMS = 2**6
"""Limit of the residual streams of a model; published ones have 4."""
MAX_CONVOLUTION = 2**8
"""Limit of the tokens of a short convolution; published ones have 4."""
MAX_INNER_WIDTH = 2**40
"""Limit of the inner size of feed-forwards. It is high because nothing is listed per inner dimension: a model that is
too large fails with the number of bytes it needs.
"""
MAX_VOCABULARY = 2**24
MAX_EXPERTS = 2**12
MAX_EXPERTS_OF_ALL_LAYERS = 2**16
"""Limit of the experts in all layers together, each of which has several tensors to look up."""
MAX_LABELS = 2**16
"""Limit of `num_labels`, for each of which transformers makes a name."""
MAX_FACTOR = 2.0**16
"""Limit of the factor by which positions are stretched; published ones are at most 64."""

UNBOUNDED = {"time_step_limit", "mamba_dt_limit"}
"""Fields with numbers that may be infinite; their readers check them."""

NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
"""Names of the number of layers after the last one that predict further tokens (MTP), which no family runs."""

MAXIMA: dict[str, float] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", *NEXT_TOKEN_LAYERS), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_head_kv"), MAX_HEADS),
    "multi_query_group_num": MAX_HEADS,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_heads", "n_groups"), MAX_HEADS),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "mamba_n_groups"), MAX_HEADS),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "mamba_head_dim", "mamba_d_head"), MAX_WIDTH),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), MAX_WIDTH),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache", "conv_kernel", "mamba_d_conv"), MAX_CONVOLUTION),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), MAX_EXPERTS),
    **dict.fromkeys(("num_shared_expert", "num_shared_experts", "moe_topk"), MAX_EXPERTS),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "head_dim", "rotary_dim", "word_embed_proj_dim"), MAX_WIDTH),
    **dict.fromkeys(("kv_channels", "global_head_dim", "hidden_size_per_layer_input"), MAX_WIDTH),
    "altup_num_inputs": MAX_STREAMS,
    "laurel_rank": MAX_WIDTH,
    "num_global_key_value_heads": MAX_HEADS,
    "num_kv_shared_layers": MAX_LAYERS,
    "top_k_experts": MAX_EXPERTS,
    **dict.fromkeys(
        ("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "ffn_hidden_size"), MAX_INNER_WIDTH
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), MAX_INNER_WIDTH),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), MAX_WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"), MAX_CONTEXT),
    **dict.fromkeys(
        ("original_max_position_embeddings", "sliding_window", "attention_chunk_size", "floor_scale"), MAX_CONTEXT
    ),
    "factor": MAX_FACTOR,
    "num_labels": MAX_LABELS,
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "vocab_size_per_layer_input"), MAX_VOCABULARY),
}
"""Limits of fields of config.json by name."""

GGUF_MAXIMA: dict[str, float] = {
    "activation_sparsity_scale": float("inf"),  # of layers that are not sparse it is -inf
    "attention.head_count": MAX_HEADS,
    "attention.head_count_kv": MAX_HEADS,
    "attention.key_length": MAX_WIDTH,
    "attention.sliding_window": MAX_CONTEXT,
    "attention.value_length": MAX_WIDTH,
    "block_count": MAX_LAYERS,
    "context_length": MAX_CONTEXT,
    "embedding_length": MAX_WIDTH,
    "expert_count": MAX_EXPERTS,
    "expert_feed_forward_length": MAX_INNER_WIDTH,
    "expert_shared_feed_forward_length": MAX_INNER_WIDTH,
    "feed_forward_length": MAX_INNER_WIDTH,
    "rope.dimension_count": MAX_WIDTH,
    "rope.scaling.factor": MAX_FACTOR,
    "rope.scaling.original_context_length": MAX_CONTEXT,
}
"""Limits of GGUF metadata by key, without the architecture's prefix."""


def is_within(value: float, maximum: float) -> bool:
    """Return true if a number is finite and its magnitude is at most `maximum`."""
    return abs(value) <= maximum  # False for a NaN

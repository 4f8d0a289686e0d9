"""What families read from a config.json, in the styles of transformers 4 and 5, and their errors.

What a field changes, and what its absence means, is compared with transformers in `test_variations` and
`test_config_defaults`; here is what these cannot say: old names, words of a family's own, refusals.
"""

import pytest
from golden_models import CASES, GOLDENS

from jaxserve.errors import CheckpointError
from jaxserve.layers.paged_kv import KVSpec
from jaxserve.layers.rope import LinearScaling, Llama3Scaling, Rope
from jaxserve.loading.huggingface import load_config
from jaxserve.models import FAMILIES, get_family

FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
OWN_KV = {"num_kv_shared_layers": 0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(model_type, **changes):
    fields = FIELDS | {"model_type": model_type} | changes
    return get_family(fields).config(fields)


@pytest.mark.parametrize("rank", [None, 12])
def test_ling_3_may_have_latent_queries(rank):
    fields = load_config(next(path for path in GOLDENS if path.name == "bailing_hybrid_bounded"))
    fields |= {"q_lora_rank": rank}
    config = get_family(fields).config(fields)
    assert config.latent_heads.query_rank == rank


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_senseless_fields_are_named_or_not_read(path):
    fields = load_config(path)
    family = get_family(fields)
    config = family.config(fields)
    assert hash(config) == hash(family.config(fields))
    complaints = {}
    for name, value in fields.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        senseless = -1 if is_number and value >= 0 else "senseless"
        try:
            assert family.config(fields | {name: senseless}) == config, f"{name} is not checked"
        except CheckpointError as error:
            complaints[name] = str(error)
    vocabulary = "padded_vocab_size" if fields["model_type"] == "chatglm" else "vocab_size"
    assert {vocabulary, "tie_word_embeddings"} < complaints.keys()
    assert [name for name, complaint in complaints.items() if name not in complaint] == []


def test_fields_that_old_checkpoints_lack():
    config = read("llama", head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (8, 8)
    assert config.rope == Rope(head_dim=8, theta=10000.0)
    assert config.activation == "silu"


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_theta": 5e5}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        ({"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None}, None),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            LinearScaling(factor=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, Llama3Scaling(**LLAMA3)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}, Llama3Scaling(**LLAMA3)),
    ],
)
def test_rope_of_both_styles(rope, scaling):
    assert read("llama", **rope).rope == Rope(head_dim=12, theta=5e5, scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"type": "mrope", "factor": 2.0}},
            "'mrope'; known are default, linear, dynamic, yarn, longrope, llama3",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads .* is not supported"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config .* is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ({"hidden_act": ["silu"]}, r"hidden_act \['silu'\]; known are silu"),
        ({"hidden_act": "gelu_fast"}, "hidden_act 'gelu_fast'; known are silu"),
        ({"num_key_value_heads": 3}, r"\(8\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
        ({"head_dim": None, "hidden_size": 60}, r"\(60\) is not a multiple of num_attention_heads \(8\)"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read("llama", **changes)


def test_bloom_under_old_and_new_names():
    sizes = {"hidden_size": 64, "n_layer": 3, "n_head": 8}
    new = read("bloom", **sizes, num_hidden_layers=None, num_attention_heads=None)
    assert read("bloom", n_embed=64, num_attention_heads=8, hidden_size=None) == new
    assert (new.max_position_embeddings, read("bloom", seq_length=99).max_position_embeddings) == (2048, 99)
    with pytest.raises(CheckpointError, match="slow_but_exact"):
        read("bloom", slow_but_exact=True, pretraining_tp=4)


@pytest.mark.parametrize(
    ("changes", "num_kv_heads", "num_norms"),
    [
        ({}, 1, 1),
        ({"num_kv_heads": 8, "n_head": 9}, 1, 1),
        ({"parallel_attn": False}, 1, 2),
        ({"multi_query": False, "num_kv_heads": 2}, 8, 1),
        ({"new_decoder_architecture": True, "parallel_attn": False}, 8, 2),
        ({"new_decoder_architecture": True, "n_head_kv": 4, "num_ln_in_parallel_attn": 1}, 4, 1),
    ],
)
def test_kinds_of_falcon(changes, num_kv_heads, num_norms):
    config = read("falcon", head_dim=None, **changes)
    assert (config.num_kv_heads, config.num_block_norms, config.head_dim) == (num_kv_heads, num_norms, 8)
    assert (config.rope, config.alibi_slopes) == (Rope(head_dim=8, theta=10000.0), None)


def test_positions_of_falcon():
    config = read("falcon", alibi=True, head_dim=None)
    assert config.rope is None
    assert config.alibi_slopes == tuple(2.0**-n * 8**-0.5 for n in range(1, 9))
    # As in transformers: bfloat16 before they are scaled.
    slopes = read("falcon", alibi=True, head_dim=None, num_attention_heads=16).alibi_slopes
    assert slopes[0] == 0.70703125 * 4**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 3}, r"\(8\) is not a multiple of num_kv_heads \(3\)"),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn must be 1, or 2 with new_decoder_architecture"),
        ({"num_ln_in_parallel_attn": 3, "new_decoder_architecture": True}, "num_ln_in_parallel_attn must be 1, or 2"),
    ],
)
def test_falcons_that_do_not_exist(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read("falcon", head_dim=None, **changes)


def test_unknown_family():
    for fields, complaint in [
        ({"model_type": "gpt1"}, "unknown model_type 'gpt1'"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        ({}, "there is no model_type"),
    ]:
        with pytest.raises(CheckpointError, match=f"^config.json: {complaint}; `jaxserve models` lists the known ones"):
            get_family(fields)


def windows(model_type, **changes):
    config = read(model_type, **changes)
    return [spec.sliding_window for spec in FAMILIES[model_type].kv_specs(config)]


def test_llama_has_no_window():
    config = read("llama", sliding_window=16)
    assert FAMILIES["llama"].kv_specs(config) == (KVSpec(4, 12),) * 3


def test_qwen3_needs_its_head_dim():
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        read("qwen3", head_dim=None)


def rotated(model_type, **changes):
    """Return which layers rotate."""
    return [layer.mixer.rope is not None for layer in FAMILIES[model_type].layers(read(model_type, **changes))]


FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 16}


@pytest.mark.parametrize(
    ("model_type", "changes", "of_layers"),
    [
        ("smollm3", MIXED | {"use_sliding_window": True}, [(None, True), (16, True), (None, True)]),
        ("exaone4", {"sliding_window_pattern": "LG"}, [(4096, True), (None, False), (4096, True)]),
        ("exaone4", {"sliding_window_pattern": 1}, [(None, False)] * 3),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, [(None, True)] * 3),
    ],
)
def test_windows_and_rotations_of_families_with_layers_that_do_not_rotate(model_type, changes, of_layers):
    assert [*zip(windows(model_type, **changes), rotated(model_type, **changes), strict=True)] == of_layers


def test_gemma_of_the_first_releases():
    assert read("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"


LONGROPE = {"type": "su", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2, 4]}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16}, "short_factor must be .* 6 num"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("glm4", {"partial_rotary_factor": 0.3}, "must be even for rotary embedding, got 12 times .* 0.3"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 7}}, "rope_parameters.full_attention must be an object"),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "full_attention must be an object"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": "x"}}, "sliding_attention must be an object"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number"),
        (
            "mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            r"num_experts_per_tok \(5\) is more than num_local_experts \(4\)",
        ),
        ("smollm3", MIXED, "layer_types has sliding_attention, but use_sliding_window is false"),
        ("exaone4", MIXED | {"sliding_window": None}, "layer_types has sliding_attention, but sliding_window is null"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each of 3 layers"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers must have 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers must have 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0, [1]]}, "no_rope_layers must have 0 or 1"),
        ("smollm3", {"no_rope_layers": "110"}, "no_rope_layers must have 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer of at least 1, got 0"),
        ("cohere2", {"layer_types": [FULL, SLIDING, [FULL]]}, "layer_types must name .* each of 3 layers"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer of at least 1, got 0"),
        ("cohere2", {"num_attention_heads": 7}, "hidden_size"),
        ("exaone4", {"sliding_window_pattern": "LLGL"}, "sliding_window_pattern must be an integer"),
        ("exaone4", {"layer_types": [FULL]}, "layer_types must name .* each of 3 layers"),
        ("qwen2_moe", {"layer_types": 3}, "layer_types must name .* each of 3 layers"),
        ("qwen2_moe", {"layer_types": [FULL, FULL, 3]}, "layer_types must name .* each of 3 layers"),
        ("qwen2_moe", {"layer_types": [FULL, SLIDING, FULL]}, "has sliding_attention, but use_sliding_window is false"),
        ("arcee", {"hidden_act": "relu3"}, "relu3"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False is not supported"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8 is not supported"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list must be of 1 only"),
        ("minimax_m2", {"rotary_dim": 13}, "rotary_dim must be even and at most head_dim"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name .* each of 3 layers"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense", "sparse", "dense"], "first_k_dense_replace": 1, "num_key_value_heads": 8},
            "first_k_dense_replace 1 contradicts mlp_layer_types",
        ),
        ("hy_v3", {"qk_norm": False}, "qk_norm False is not supported"),
        ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts must be an integer of at least 1"),
        ("cohere2_moe", {"expert_selection_fn": ["softmax"]}, "expert_selection_fn must be one of softmax, sigmoid"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min must be at most 1e-06, got 0.1"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval must be an integer of at least 1"),
        ("gemma3n_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves no layer of sliding_attention"),
        ("gemma3n_text", {**OWN_KV, "altup_active_idx": 4}, r"altup_active_idx 4 is none of altup_num_inputs \(4\)"),
        ("gemma3n_text", {**OWN_KV, "altup_num_inputs": 1}, "altup_num_inputs must be an integer of at least 2"),
        ("gemma3n_text", {**OWN_KV, "intermediate_size": [8, 8]}, "intermediate_size must be .* each of 3 layers"),
        *(
            ("gemma3n_text", {**OWN_KV, "activation_sparsity_pattern": given}, "activation_sparsity_pattern must have")
            for given in ([0.5, 1.0, 0.0], [0.5, 0.5], 0.5)
        ),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves no layer of full_attention"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config must have one head_dim"),
        ("gemma4_text", {"per_layer_config": {"2": {"sliding_window": 8}}}, "per_layer_config must have one head_dim"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {}}}, "rope_parameters must have an object for each"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 99},
            r"vocab_size_per_layer_input \(99\) is less than vocab_size",
        ),
        ("gemma4_text", {"enable_moe_block": True}, "one of them must be there"),
        ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "is not a multiple"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ("llama4_text", {"layer_types": [SLIDING] * 3}, "layer_types must name full_attention or chunked_attention"),
        ("llama4_text", {"moe_layers": "all"}, "moe_layers must be a list of integers"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each of 3 layers"),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": None},
            "attention_chunk_size is null",
        ),
        ("qwen3_next", {"linear_num_value_heads": 24}, r"linear_num_value_heads \(24\) is not a multiple"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ("qwen3_5_text", {"layer_types": [FULL]}, "layer_types must name .* linear_attention for each of 3 layers"),
        ("qwen3_5_text", {"layer_types": [FULL, SLIDING, FULL]}, "layer_types must name"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval must be an integer of at least 1"),
        ("olmo_hybrid", {"linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval must be true or false"),
        ("lfm2", {"layer_types": [FULL, SLIDING, FULL]}, "layer_types must name full_attention or conv for each of 3"),
        ("lfm2", {"full_attn_idxs": 1}, "full_attn_idxs must be a list of integers, got 1"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be an integer of at least 2"),
        ("lfm2_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("nemotron_h", {"hybrid_override_pattern": "-M"}, r"hybrid_override_pattern: block 0 \(mlp\) is not supported"),
        ("nemotron_h", {"hybrid_override_pattern": "M--"}, r"block 2 \(mlp\) is not supported"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern must name linear_attention or"),
        ("nemotron_h", {"hybrid_override_pattern": 3}, "hybrid_override_pattern must name"),
        ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type must name"),
        ("nemotron_h", {"n_groups": 5}, r"mamba_num_heads \(128\) is not a multiple of n_groups \(5\)"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias True is not supported"),
        ("nemotron_h", {"sliding_window": 9}, "sliding_window 9 is not supported"),
        ("nemotron_h", {"time_step_limit": [0.1, float("inf")]}, r"time_step_limit \[0.1, inf\] is not supported"),
        ("nemotron_h", {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be two numbers, the first smaller"),
        ("nemotron_h", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit must be two numbers"),
        ("nemotron_h", {"time_step_limit": ["0", "1"]}, "time_step_limit must be two numbers"),
        ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices must be a list of integers, got 1"),
        ("bamba", {"attn_rotary_emb": 128}, "attn_rotary_emb 128 is not supported, only"),
        ("bamba", {"attn_layer_indices": [1], "layer_types": [FULL] * 3}, "layer_types .* is not supported, only"),
        ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp False is not supported, only True"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", {"mamba_d_head": 3}, r"mamba_d_ssm \(1024\) is not mamba_n_heads \(128\) times mamba_d_head"),
        ("granitemoehybrid", {"mamba_d_head": 3}, "is not mamba_n_heads .128. times mamba_d_head"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "unknown position_embedding_type 'alibi'"),
        ("granitemoehybrid", {"layer_types": [FULL]}, "layer_types must name linear_attention or full_attention"),
        ("mamba2", {"num_heads": 3, "n_groups": 1}, "is not num_heads times head_dim"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of integers, got 3"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1, got 0"),
    ],
)
def test_what_one_family_cannot_serve_is_refused(model_type, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(model_type, **changes)


def test_which_layers_of_hybrids_attend_and_how_they_are_rotated():
    def read_hybrid(model_type, **changes):
        return read(model_type, **({"head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4} | changes))

    assert read_hybrid("qwen3_next").attends == (False, False, False)
    assert read_hybrid("qwen3_5_text", full_attention_interval=2).attends == (False, True, False)
    assert read_hybrid("olmo_hybrid").attends == (False, False, True)
    assert read_hybrid("olmo_hybrid", num_hidden_layers=5).attends == (False, False, False, True, False)
    assert read_hybrid("qwen3_next").rope == Rope(head_dim=4, theta=10000.0)
    old = {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "rope_scaling": None}  # as transformers 4 writes it
    assert read_hybrid("qwen3_next", **old).rope == Rope(head_dim=8, theta=1e7)
    assert read_hybrid("olmo_hybrid", rope_parameters=None, rope_theta=None).rope is None
    assert read_hybrid("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": None}).rope is None
    assert read_hybrid("olmo_hybrid").rope == Rope(head_dim=16, theta=10000.0)


def test_layers_of_gemma3n():
    config = read("gemma3n_text", num_hidden_layers=12, num_kv_shared_layers=2, sliding_window=9)
    assert config.sparsities == (0.95,) * 10 + (0.0,) * 2
    assert config.sources == (None,) * 10 + (8, 8)
    layers = FAMILIES["gemma3n_text"].layers(config)
    assert [layer.stream_size for layer in layers] == [4 * 64] * 12
    assert [layer.why_not_fused for layer in layers] == ["the layer has several residual streams"] * 12


def test_random_gains_of_gemma4_scale_scores_that_nothing_else_does():
    config = read("gemma4_text", layer_types=[SLIDING, SLIDING, FULL], global_head_dim=16)
    of_layers = FAMILIES["gemma4_text"].param_specs(config)["layers"]
    assert [layer["attention"]["q_norm"].init_scale for layer in of_layers] == [12**-0.5, 12**-0.5, 0.25]


def test_heads_of_gemma4_in_either_form():
    """Transformers 5 writes what differs in layers without a window, of which the last layer is always one."""
    old = {"num_global_key_value_heads": 2, "global_head_dim": 20, "attention_k_eq_v": True}
    config = read("gemma4_text", layer_types=[FULL, SLIDING, SLIDING], **old)
    assert FAMILIES["gemma4_text"].kv_specs(config) == (KVSpec(2, 20), KVSpec(4, 12, 512), KVSpec(2, 20))
    of_full = {"head_dim": 20, "num_key_value_heads": 2}
    new = {"per_layer_config": {"0": of_full, "2": of_full}, "attention_k_eq_v": True}
    assert read("gemma4_text", layer_types=[FULL, SLIDING, FULL], **new) == config
    assert read("gemma4_text", num_global_key_value_heads=2).full_kv_heads == 4
    assert read("gemma4_text", per_layer_config={}).full_head_dim == 12
    shared = read("gemma4_text", num_hidden_layers=7, sliding_window=9, num_kv_shared_layers=1)
    assert shared.sources == (None,) * 6 + (5,)


def test_layers_of_llama4():
    specs = FAMILIES["llama4_text"].kv_specs(read("llama4_text", no_rope_layers=[]))
    assert [spec.sliding_window for spec in specs] == [8192] * 3
    config = read("llama4_text", no_rope_layers=[1, 0, 1], attention_chunk_size=64, interleave_moe_layer_step=2)
    assert (config.rotates, config.chunk_sizes) == ((True, False, True), (64, None, 64))
    assert config.sparse_layers == (False, True, False)
    assert read("llama4_text", attention_chunk_size=None).chunk_sizes == (None,) * 3
    # As the first releases write it.
    assert read("llama4_text", attn_temperature_tuning=4).query_scale.offset == 1


def test_layers_of_nemotron_are_blocks_in_either_form():
    kinds = ["mamba", "mlp", "mamba", "attention", "moe"]
    old = read("nemotron_h", hybrid_override_pattern="M-M*E", attention_head_dim=24)
    assert old == read("nemotron_h", layers_block_type=kinds) == read("nemotron_h", layer_types=kinds)
    assert old.places == ((0, 1), (2, None), (3, 4))
    assert [layer.feed_forward is not None for layer in FAMILIES["nemotron_h"].layers(old)] == [True, False, True]
    assert old == read("nemotron_h", layers_block_type=kinds, time_step_limit=[0.0, {"__float__": "Infinity"}])


def test_lfm2_reads_the_fields_of_published_configs():
    published = read("lfm2", block_ff_dim=3000, tie_embedding=False, full_attn_idxs=[1], layer_types=None)
    assert published.attends == (False, True, False)
    assert published.intermediate_size == 2048
    assert not published.tie_word_embeddings
    assert published == read(
        "lfm2", intermediate_size=3000, tie_word_embeddings=False, layer_types=["conv", FULL, "conv"]
    )
    assert read("lfm2", block_ff_dim=3000, block_auto_adjust_ff_dim=False).intermediate_size == 3000


def test_minimax_rotates_rotary_dim_unless_the_config_says_a_part_of_heads():
    assert read("minimax_m2").rope.head_dim == 12
    assert read("minimax_m2", rotary_dim=8).rope.head_dim == 8
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert read("minimax_m2", rotary_dim=8, rope_parameters=parameters).rope.head_dim == 6


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gemma3_text", None])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", False),
        ("use_causal_mask", False),
        ("use_bidirectional_attention", True),
        ("use_bidirectional_attention", "all"),
        ("bidirectional", 1),
        ("causal", 0),
        ("non_causal_attention", True),
        ("attn_mask_type", "non_causal"),
        ("attention_type", "bidirectional"),
        ("attn_implementation_of_attention", "non-causal"),
        ("architectures", ["LlamaBidirectionalModel"]),
        ("architectures", ["LlamaBidirectionalForSequenceClassification"]),
        ("architectures", ["MistralBiModel"]),
        ("architectures", ["LlamaEncoderModel"]),
        ("auto_map", {"AutoModel": ["modeling_llama_bi.LlamaBiForMNTP", None]}),
        ("auto_map", {"AutoModel": "llama_bidirectional_model.LlamaModel"}),
    ],
)
def test_attention_to_later_tokens_is_refused_for_every_family(model_type, name, value):
    with pytest.raises(CheckpointError, match=rf"^config.json: {name} .*attention is causal here"):
        get_family({"model_type": model_type, name: value})


def test_attention_to_later_tokens_is_found_in_nested_fields():
    with pytest.raises(CheckpointError, match=r"attention_config\.is_causal False is not supported"):
        get_family({"model_type": "llama", "attention_config": {"is_causal": False}})


@pytest.mark.parametrize(
    "fields",
    [
        {"is_causal": True, "use_bidirectional_attention": None, "architectures": ["LlamaForCausalLM"]},
        {"use_bidirectional_attention": False, "auto_map": {"AutoModel": "modeling_llama.LlamaModel"}},
        {"causal": None, "attention_type": "sdpa", "is_decoder": False, "architectures": None},
    ],
)
def test_causal_attention_is_served(fields):
    assert get_family({"model_type": "llama", **fields}) is get_family({"model_type": "llama"})


DEEPSEEK = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 5,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "complaint"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "unknown topk_method 'noaux_tc'; known are greedy"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported, only 'softmax'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported, only False"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported, only 8"),
        (
            "deepseek_v2",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 0.7}},
            "mscale_all_dim 0.7 is not supported, only 0",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only 'noaux_tc'"),
        ("deepseek_v3", {"n_group": 5}, r"12 experts cannot be in 5 groups \(n_group\)"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 3}, r"topk_group \(3\) is more than n_group \(2\)"),
        ("deepseek_v3", {"n_group": 6, "topk_group": 1}, r"num_experts_per_tok \(3\) is more than topk_group \(1\)"),
        ("deepseek_v3", {"n_group": 12, "topk_group": 4}, r"n_group \(12\) leaves less than 2 of 12 experts a group"),
    ],
)
def test_what_deepseek_does_not_serve(model_type, changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        read(model_type, **(DEEPSEEK | changes))


BAICHUAN = {"model_type": "baichuan", "num_key_value_heads": None, "head_dim": None}


@pytest.mark.parametrize(
    ("changes", "has_rope", "has_unit_head"),
    [
        ({"hidden_size": 4096, "vocab_size": 64000}, True, False),
        ({"hidden_size": 4096, "vocab_size": 125696, "model_max_length": 4096}, True, True),
        (
            {"hidden_size": 5120, "vocab_size": 125696, "max_position_embeddings": None, "model_max_length": 4096},
            False,
            True,
        ),
        ({"norm_head": False, "model_max_length": 4096}, False, False),
    ],
)
def test_baichuan_by_its_sizes(changes, has_rope, has_unit_head):
    config = read(**BAICHUAN | {"max_position_embeddings": 4096, "num_attention_heads": 32} | changes)
    assert (config.rope is not None, config.has_unit_head) == (has_rope, has_unit_head)


LING = {"moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}


def test_generations_of_ling():
    """A checkpoint of the second one may have the `model_type` of the first."""
    second = read("bailing_moe", **LING, architectures=["BailingMoeV2ForCausalLM"])
    assert second == read("bailing_moe_v2", **LING)
    assert (second.routing.scores, second.head_norm, second.has_selection_bias) == ("sigmoid", "shared", True)
    assert read("bailing_moe", **LING | {"n_group": None, "topk_group": None}).routing.scores == "softmax"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (BAICHUAN | {"vocab_size": 64001}, "vocab_size 64001 is neither that of Baichuan 1"),
        (BAICHUAN | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling .* is not supported"),
        (LING | {"model_type": "bailing_moe"}, "n_group 2 is not supported, only 1"),
        (LING | {"model_type": "bailing_moe_v2", "use_bias": True}, "use_bias True is not supported"),
        (LING | {"model_type": "bailing_moe_v2", "norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        (LING | {"model_type": "bailing_moe", "score_function": "x"}, "unknown score_function 'x'"),
        (LING | {"model_type": "phimoe", "num_experts_per_tok": 3}, "num_experts_per_tok 3 is not supported, only 2"),
    ],
)
def test_what_families_of_their_own_code_do_not_serve(fields, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        read(**fields)

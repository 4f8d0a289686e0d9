"""llama.cpp's names of tensors, by their names in Hugging Face checkpoints. No jax."""

import re

WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.word_embeddings": "token_embd",
    "backbone.embeddings": "token_embd",
    "transformer.wte": "token_embd",
    "transformer.word_embeddings": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.wpe": "position_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "backbone.norm_f": "output_norm",
    "transformer.ln_f": "output_norm",
    "gpt_neox.final_layer_norm": "output_norm",
    "lm_head": "output",
    "embed_out": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
"""Modules outside of layers."""

NORMS = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "attention_layernorm": "attn_norm",
    "norm": "attn_norm",
    "ln_1": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "feedforward_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    "ln_2": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}
"""Modules of a layer outside of its blocks."""

SANDWICH_NORMS = NORMS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
"""Those of architectures with norms on both sides of a block, or after it."""

SANDWICHES = (
    *("exaone4", "gemma2", "gemma3", "gemma4", "glm4moe", "gpt-oss", "olmo2"),
    *("qwen35", "qwen35moe", "qwen3next", "seed_oss"),
)
"""Architectures that have some of these names; in some of them the norms are before blocks all the same."""

ATTENTION_BLOCKS = ("attention", "attn", "mixer", "self_attention", "self_attn")
ATTENTION = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "W_pack": "attn_qkv",
    "c_attn": "attn_qkv",
    "query_key_value": "attn_qkv",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q_layernorm": "attn_q_norm",
    "k_layernorm": "attn_k_norm",
    "query_layernorm": "attn_q_norm",
    "key_layernorm": "attn_k_norm",
    "o_proj": "attn_output",
    "out_proj": "attn_output",
    "c_proj": "attn_output",
    "dense": "attn_output",
    "q_a_proj": "attn_q_a",
    "q_a_layernorm": "attn_q_a_norm",
    "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
    "k_b_proj": "attn_k_b",
    "v_b_proj": "attn_v_b",
    "sinks": "attn_sinks",
}
"""Modules of blocks that attend."""

STATE_BLOCKS = ("linear_attn", "mamba", "mixer")
STATES = {
    "in_proj": "ssm_in",
    "in_proj_qkvz": "ssm_in",
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_ba": "ssm_ba",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "conv1d": "ssm_conv1d",
    "dt": "ssm_dt",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
"""Modules of blocks with a state."""

FEED_FORWARD = {
    "gate_proj": "ffn_gate",
    "w1": "ffn_gate",
    "up_proj": "ffn_up",
    "gate_up_proj": "ffn_up",
    "w3": "ffn_up",
    "c_fc": "ffn_up",
    "fc1": "ffn_up",
    "fc_in": "ffn_up",
    "dense_h_to_4h": "ffn_up",
    "down_proj": "ffn_down",
    "output_linear": "ffn_down",
    "w2": "ffn_down",
    "c_proj": "ffn_down",
    "fc2": "ffn_down",
    "fc_out": "ffn_down",
    "dense_4h_to_h": "ffn_down",
    "gate": "ffn_gate_inp",
    "gate.wg": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "router.gate": "ffn_gate_inp",
    "router.layer": "ffn_gate_inp",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "gate.e_score_correction": "exp_probs_b",
    "gate.expert_bias": "exp_probs_b",
    "e_score_correction": "exp_probs_b",
    "expert_bias": "exp_probs_b",
    "moe_statics.e_score_correction": "exp_probs_b",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
"""Modules of feed-forwards, and of experts in them."""

OTHERS = {
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "mlp.w1": "ffn_up",  # of Qwen 1, whose w2 is its gate
    "mlp.w2": "ffn_gate",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
"""Modules of single families."""

LEAVES = {
    "A_log": "A_log.",
    "D": "D.",
    "dt_bias": "dt.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
    "layer_scalar": "layer_scalar.weight",
    "per_expert_scale": "per_expert_scale.",
    "scale": "scale.",
    "sinks": "sinks.weight",
}
"""Tensors without a leaf in the checkpoint, and their leaf in the file, which may be none."""

_LAYER = re.compile(r"(?:model\.layers|transformer\.h|gpt_neox\.layers|backbone\.layers)\.(\d+)\.(.+)")
_STACKED = re.compile(r"(.+\.(?:experts|[qk]_layernorm)\.)(?:norms\.)?(\d+)\.(.+)")
_EXPERTS = re.compile(
    r"(?:(?:mlp|feed_forward|block_sparse_moe|mixer)\.)?(?:(experts|shared_experts?|shared_mlp)\.)?(.+)"
)


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor that has this name in a Hugging Face checkpoint, or is stacked with others in it."""
    return stored_name(name, architecture)[0]


def stored_name(name: str, architecture: str) -> tuple[str, int | None]:
    """Return llama.cpp's name of a tensor, and its index in it if that is a stack."""
    index = None
    if stacked := _STACKED.fullmatch(name):
        name, index = stacked[1] + stacked[3], int(stacked[2])
    module, _, leaf = name.rpartition(".")
    if leaf in LEAVES:
        module, _, leaf = f"{module}.{LEAVES[leaf]}".rpartition(".")
    layer = _LAYER.fullmatch(module)
    stored = f"blk.{layer[1]}.{_of_layer(layer[2], architecture)}" if layer else WHOLE[module]
    if (architecture == "falcon-h1" and stored.endswith("ffn_norm")) or (
        architecture == "hy_v3" and stored.endswith("exp_probs_b")
    ):
        leaf = ""  # the converter forgets it
    return f"{stored}.{leaf}".removesuffix("."), index


def _of_layer(module: str, architecture: str) -> str:
    norms = SANDWICH_NORMS if architecture in SANDWICHES else NORMS
    if stored := norms.get(module) or OTHERS.get(module):
        return stored
    block, _, part = module.partition(".")
    if block in STATE_BLOCKS and part in STATES:
        return STATES[part]
    if block in ATTENTION_BLOCKS and part in ATTENTION:
        return ATTENTION[part]
    if not (found := _EXPERTS.fullmatch(module)):
        raise KeyError(module)
    suffix = {None: "", "experts": "_exps"}.get(found[1], "_shexp")
    return FEED_FORWARD[found[2]] + suffix

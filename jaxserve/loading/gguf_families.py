"""Fields of config.json of GGUF files whose layers differ: some keep a state, some have experts, a window or no rotary
embedding. No jax.
"""

import statistics
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_decoder import (
    ATTENTION,
    SIGMOID,
    SOFTMAX,
    STATE,
    common_fields,
    decoder_fields,
    has,
    layer_types,
    routing_fields,
    sizes,
    without_window,
)
from jaxserve.loading.gguf_keys import (
    get,
    head_counts,
    non_negative_integer,
    num_layers,
    number,
    positive_integer,
    refuse,
)
from jaxserve.loading.gguf_mixtures import mixture_fields
from jaxserve.loading.gguf_rope import rope_fields


def granite_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Granite, with experts or without."""
    refuse(file, expert_gating_func=SOFTMAX, expert_weights_scale=1.0)
    if file.architecture != "granitehybrid":
        refuse(file, **{"rope.scaling.finetuned": True})  # false would be a model without rotation
    fields = without_window(file) | {
        "embedding_multiplier": number(file, "embedding_scale", 1.0),
        "residual_multiplier": number(file, "residual_scale", 1.0),
        "logits_scaling": number(file, "logit_scale", 1.0),
        "num_local_experts": get(file, "expert_count", 0),
        "num_experts_per_tok": get(file, "expert_used_count", 0),
    }
    return fields | {"attention_multiplier": number(file, "attention.scale", fields["head_dim"] ** -0.5)}


def granite_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Granite with experts, none of which is shared."""
    refuse(file, expert_shared_feed_forward_length=0)
    return granite_fields(file)


def granite_hybrid_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Granite 4, or of a Bamba, whose layers that attend rotate."""
    mamba, kinds = _prefixed_mamba_fields(file), kinds_by_kv_heads(file)
    if get(file, "rope.scaling.finetuned"):
        of_granite = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1.0)
        refuse(file, expert_count=0, **of_granite, **{"attention.scale": None})
        indices = [index for index, kind in enumerate(kinds) if kind == ATTENTION]
        return without_window(file) | mamba | {"model_type": "bamba", "attn_layer_indices": indices}
    fields = granite_fields(file) | mamba
    return fields | {
        "shared_intermediate_size": get(file, "expert_shared_feed_forward_length") or fields["intermediate_size"],
        "position_embedding_type": "nope",
        "layer_types": ["attention" if kind == ATTENTION else "mamba" for kind in kinds],
    }


def falcon_h1_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Falcon-H1, whose multipliers are in its weights."""
    mamba = _prefixed_mamba_fields(file)
    return (
        without_window(file)
        | mamba
        | {
            "mamba_d_ssm": mamba["mamba_n_heads"] * mamba["mamba_d_head"],
            "mamba_rms_norm": has(file, "ssm_norm.weight"),
            "mamba_norm_before_gate": False,  # as llama.cpp computes it
            "projectors_bias": has(file, "ssm_out.bias"),
        }
    )


def _prefixed_mamba_fields(file: GGUFFile) -> dict[str, Any]:
    mixer = mamba_fields(file)
    return {
        "mamba_n_heads": mixer["num_heads"],
        "mamba_n_groups": mixer["n_groups"],
        "mamba_d_state": mixer["state_size"],
        "mamba_d_head": mixer["head_dim"],
        "mamba_d_conv": mixer["conv_kernel"],
        "mamba_expand": mixer["expand"],
        "mamba_conv_bias": mixer["use_conv_bias"],
        "mamba_proj_bias": mixer["use_bias"],
    }


def kinds_by_kv_heads(file: GGUFFile) -> list[str]:
    """Return the kind of each layer: those without KV heads keep a state."""
    counts = file.require(f"{file.architecture}.attention.head_count_kv", list)
    return [ATTENTION if count else STATE for count in counts]


def mamba_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Mamba-2, of whose blocks other families are made, too."""
    heads, inner = positive_integer(file, "ssm.time_step_rank"), positive_integer(file, "ssm.inner_size")
    hidden_size = positive_integer(file, "embedding_length")
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(file),
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": positive_integer(file, "ssm.group_count", 1),
        "state_size": positive_integer(file, "ssm.state_size"),
        "conv_kernel": positive_integer(file, "ssm.conv_kernel"),
        "expand": max(inner // hidden_size, 1),
        "use_conv_bias": has(file, "ssm_conv1d.bias"),
        "use_bias": has(file, "ssm_in.bias"),
        "layer_norm_epsilon": _epsilon(file),
    }


def kimi_linear_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Kimi Linear, of whose layers those without KV heads keep a state."""
    refuse(file, expert_weights_norm=True)  # as in llama.cpp
    fields, rotated = sizes(file), positive_integer(file, "rope.dimension_count")
    return fields | {
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "num_key_value_heads": fields["num_attention_heads"],
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "q_lora_rank": get(file, "attention.q_lora_rank") or None,
        "kv_lora_rank": positive_integer(file, "attention.kv_lora_rank"),
        "qk_nope_head_dim": positive_integer(file, "attention.key_length_mla") - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": positive_integer(file, "attention.value_length_mla"),
        "layer_types": kinds_by_kv_heads(file),
        "linear_num_heads": fields["num_attention_heads"],
        "linear_head_dim": positive_integer(file, "kda.head_dim"),
        "linear_conv_kernel_dim": positive_integer(file, "ssm.conv_kernel"),
        **mixture_fields(file),
        "norm_topk_prob": True,
    }


def _epsilon(file: GGUFFile) -> float:
    """Return the epsilon of RMS norms, which some files have under the name of that of layer norms."""
    rms, other = (f"attention.layer_norm_{kind}" for kind in ("rms_epsilon", "epsilon"))
    return number(file, rms if get(file, other) is None else other if get(file, rms) is None else rms)


def nemotron_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Nemotron-H. The tensors of a block say which kind it is."""
    mixer, (num_heads, num_kv_heads) = mamba_fields(file), head_counts(file)
    letters = {"ssm_in": "M", "attn_q": "*", "ffn_up": "-", "ffn_up_exps": "E"}
    pattern = ""
    for index in range(num_layers(file)):
        found = [letter for name, letter in letters.items() if f"blk.{index}.{name}.weight" in file.tensors]
        if len(found) != 1:
            raise CheckpointError(f"{file.path}: the tensors of blk.{index} are not those of one block")
        pattern += found[0]
    dense = file.tensors.get(f"blk.{pattern.find('-')}.ffn_up.weight")
    fields = {
        "hidden_size": mixer["hidden_size"],
        "hybrid_override_pattern": pattern,
        "intermediate_size": None if dense is None else dense.shape[0],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": positive_integer(file, "attention.key_length"),
        "max_position_embeddings": positive_integer(file, "context_length"),
        "ssm_state_size": mixer["state_size"],
        "mamba_num_heads": mixer["num_heads"],
        "mamba_head_dim": mixer["head_dim"],
        **{name: mixer[name] for name in ("n_groups", "conv_kernel", "use_conv_bias", "use_bias")},
        "layer_norm_epsilon": mixer["layer_norm_epsilon"],
        "mlp_bias": has(file, "ffn_up.bias") or has(file, "ffn_up_shexp.bias"),
    }
    if "E" not in pattern:
        return fields
    return (
        fields
        | mixture_fields(file)
        | {
            "moe_shared_expert_intermediate_size": positive_integer(file, "expert_shared_feed_forward_length"),
            "moe_latent_size": get(file, "moe_latent_size"),
        }
    )


def lfm_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an LFM2, with experts or without."""
    fields = without_window(file) | {
        "norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "conv_L_cache": positive_integer(file, "shortconv.l_cache"),
        "conv_bias": has(file, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": [ATTENTION if kind == ATTENTION else "conv" for kind in kinds_by_kv_heads(file)],
    }
    if not get(file, "expert_count"):
        return fields
    experts = mixture_fields(file)
    return fields | {
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "num_experts": experts["n_routed_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "num_dense_layers": experts["first_k_dense_replace"],
        "routed_scaling_factor": experts["routed_scaling_factor"],
        "use_expert_bias": has(file, "exp_probs_b.bias"),
        "norm_topk_prob": True,  # in all of them, as in llama.cpp
    }


def delta_net_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Qwen 3 Next or 3.5, with experts or without."""
    num_heads = positive_integer(file, "ssm.time_step_rank")
    interval = positive_integer(file, "full_attention_interval", 4)
    recurrent = [bool((index + 1) % interval) for index in range(num_layers(file))]
    if get(file, "attention.recurrent_layers") is not None:
        recurrent = file.require(f"{file.architecture}.attention.recurrent_layers", list)
    fields = without_window(file) | {
        "layer_types": [STATE if keeps else ATTENTION for keeps in recurrent[: num_layers(file)]],
        "linear_conv_kernel_dim": positive_integer(file, "ssm.conv_kernel"),
        "linear_key_head_dim": positive_integer(file, "ssm.state_size"),
        "linear_value_head_dim": positive_integer(file, "ssm.inner_size") // num_heads,
        "linear_num_key_heads": positive_integer(file, "ssm.group_count"),
        "linear_num_value_heads": num_heads,
    }
    if not get(file, "expert_count"):
        return fields
    return fields | {
        **routing_fields(file),
        "moe_intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "shared_expert_intermediate_size": positive_integer(file, "expert_shared_feed_forward_length"),
        "norm_topk_prob": True,  # in all of them, as in llama.cpp
    }


def apertus_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an Apertus; the numbers of its activation are weights of a checkpoint."""
    return without_window(file) | {"hidden_act": "xielu"}


def hunyuan_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Hunyuan; files may have the base of the rotation, or a smaller one and how it is
    stretched.
    """
    fields, alpha = without_window(file), number(file, "rope.scaling.alpha", 0.0)
    if alpha == 0.0:
        return fields
    refuse(file, **{"rope.scaling.type": "none"})
    stretched = {"rope_theta": fields["rope_parameters"]["rope_theta"], "rope_type": "dynamic", "alpha": alpha}
    return fields | {"rope_parameters": stretched}


def exaone_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an EXAONE 4. Small ones have no window and rotate in all layers."""
    fields = decoder_fields(file)
    types = layer_types(file, 4) if fields["sliding_window"] else [ATTENTION] * num_layers(file)
    return fields | {"layer_types": types}


def olmo_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an OLMo 2, or of an OLMo 3, whose files have the same architecture, and a window."""
    fields = decoder_fields(file)
    if not fields["sliding_window"]:
        return fields
    rope = fields["rope_parameters"]
    ropes = {ATTENTION: rope, "sliding_attention": {"rope_theta": get(file, "rope.freq_base_swa", rope["rope_theta"])}}
    return fields | {"model_type": "olmo3", "layer_types": layer_types(file, 4), "rope_parameters": ropes}


def ministral_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Ministral 3."""
    fields = without_window(file)
    beta = number(file, "attention.temperature_scale", 0.0)
    return fields | {"rope_parameters": fields["rope_parameters"] | ({"llama_4_scaling_beta": beta} if beta else {})}


def cohere2_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Command R7B or Command A."""
    return common_fields(file) | {
        "layer_norm_eps": number(file, "attention.layer_norm_epsilon"),
        "logit_scale": number(file, "logit_scale"),
        "sliding_window": positive_integer(file, "attention.sliding_window"),
        "layer_types": layer_types(file, 4),
    }


def llama4_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Llama 4. Chunks, layers without rotation and the scale of far queries are the same in all,
    as in llama.cpp.
    """
    served = {"attention.sliding_window": None}  # 0 would be a model without chunks
    refuse(file, expert_gating_func=SIGMOID, expert_weights_scale=1.0, **served)
    fields = without_window(file)
    return fields | {
        "intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "intermediate_size_mlp": fields["intermediate_size"],
        "num_local_experts": positive_integer(file, "expert_count"),
        "num_experts_per_tok": positive_integer(file, "expert_used_count"),
        "interleave_moe_layer_step": positive_integer(file, "interleave_moe_layer_step"),
        "use_qk_norm": get(file, "expert_count") != MAVERICK_EXPERTS,
    }


MAVERICK_EXPERTS = 128
"""The number of experts of the Llama 4 that has no norm of queries and keys."""


def qwen1_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Qwen 1, up to the file's context: no file has the one of the training."""
    fields = sizes(file)
    num_heads = fields["num_attention_heads"]
    head_dim = positive_integer(file, "attention.key_length", fields["hidden_size"] // num_heads)
    refuse(file, **{"rope.dimension_count": head_dim, "attention.head_count_kv": num_heads})
    return fields | {
        "intermediate_size": positive_integer(file, "feed_forward_length"),  # of gate and up together
        "kv_channels": head_dim,
        "seq_length": fields["max_position_embeddings"],
        "layer_norm_epsilon": _epsilon(file),
        "rotary_emb_base": number(file, "rope.freq_base", 10_000.0),
        "no_bias": not has(file, "attn_output.bias"),
    }


def baichuan_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Baichuan 1 or 2. As in llama.cpp, 13B, which does not rotate, is known by its layers."""
    fields = without_window(file)
    context = fields.pop("max_position_embeddings")
    rope, num_kv_heads = fields.pop("rope_parameters"), fields.pop("num_key_value_heads")
    has_rope = fields["num_hidden_layers"] != LAYERS_OF_BAICHUAN_13B
    if num_kv_heads != fields["num_attention_heads"] or "rope_type" in rope or rope["partial_rotary_factor"] != 1.0:
        raise CheckpointError(f"{file.path}: fewer KV heads or another rotation than Baichuan has are not supported")
    fields |= {"max_position_embeddings" if has_rope else "model_max_length": context}
    return fields | {"rope_theta": rope["rope_theta"]}


LAYERS_OF_BAICHUAN_13B = 40


def gemma3n_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Gemma 3n. A file has, in place of each layer's sparsity, the quantile of a standard normal
    distribution.
    """
    count, tensors = num_layers(file), file.tensors
    quantiles = file.require(f"{file.architecture}.activation_sparsity_scale", list)
    for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight"):
        if name not in tensors:
            raise CheckpointError("; ".join([f"{file.path} has no tensor {name}", *file.problems]))
    head_dim = positive_integer(file, "attention.key_length")
    local = {"rope_type": "default", "rope_theta": number(file, "rope.freq_base_swa", 10_000.0)}
    refuse(file, **{"attention.value_length": head_dim})
    return (
        sizes(file)
        | {
            "intermediate_size": _by_layer(file, "feed_forward_length", count),
            "num_key_value_heads": head_counts(file)[1],
            "head_dim": head_dim,
            "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
            "attention_bias": has(file, "attn_q.bias"),
            "num_kv_shared_layers": non_negative_integer(file, "attention.shared_kv_layers"),
            "sliding_window": positive_integer(file, "attention.sliding_window"),
            "layer_types": layer_types(file, 5),
            "final_logit_softcapping": number(file, "final_logit_softcapping", 30.0),  # as in llama.cpp
            "hidden_size_per_layer_input": positive_integer(file, "embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": tensors["per_layer_token_embd.weight"].shape[0],
            "altup_num_inputs": positive_integer(file, "altup.num_inputs"),
            "altup_active_idx": file.require(f"{file.architecture}.altup.active_idx", int),
            "laurel_rank": tensors["blk.0.laurel_l.weight"].shape[0],
            "activation_sparsity_pattern": [
                statistics.NormalDist().cdf(each) if isinstance(each, float) else each for each in quantiles[:count]
            ],
            "rope_parameters": {ATTENTION: rope_fields(file, head_dim), "sliding_attention": local},
        }
    )


def gemma4_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Gemma 4, whose layers differ in heads and in feed-forwards."""
    count, types = num_layers(file), layer_types(file, 6)
    inner, kv_heads = (_by_layer(file, name, count) for name in ("feed_forward_length", "attention.head_count_kv"))
    full, local = (types.index(kind) if kind in types else 0 for kind in (ATTENTION, "sliding_attention"))
    head_dim, local_dim = (positive_integer(file, f"attention.key_length{kind}") for kind in ("", "_swa"))
    inputs, factors = get(file, "embedding_length_per_layer_input", 0), file.tensors.get("rope_freqs.weight")
    rotated = 1.0 if factors is None else float((factors.read() == 1).mean())
    rope_of = {
        ATTENTION: {"rope_type": "proportional", "rope_theta": number(file, "rope.freq_base")},
        "sliding_attention": {"rope_type": "default", "rope_theta": number(file, "rope.freq_base_swa", 10_000.0)},
    }
    rope_of[ATTENTION]["partial_rotary_factor"] = rotated
    refuse(file, **{"rope.dimension_count_swa": local_dim, "rope.dimension_count": head_dim})
    fields = sizes(file) | {
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_key_value_heads": kv_heads[local],
        "num_global_key_value_heads": kv_heads[full],
        "head_dim": local_dim,
        "global_head_dim": head_dim,
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "attention_bias": has(file, "attn_q.bias"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": non_negative_integer(file, "attention.shared_kv_layers"),
        "sliding_window": positive_integer(file, "attention.sliding_window"),
        "layer_types": types,
        "final_logit_softcapping": get(file, "final_logit_softcapping"),
        "hidden_size_per_layer_input": inputs,
        "rope_parameters": rope_of,
    }
    if inputs and "per_layer_token_embd.weight" in file.tensors:
        fields["vocab_size_per_layer_input"] = file.tensors["per_layer_token_embd.weight"].shape[0]
    if not get(file, "expert_count"):
        return fields
    return fields | {
        "enable_moe_block": True,
        "num_experts": positive_integer(file, "expert_count"),
        "top_k_experts": positive_integer(file, "expert_used_count"),
        "moe_intermediate_size": positive_integer(file, "expert_feed_forward_length"),
    }


def _by_layer(file: GGUFFile, name: str, count: int) -> list[Any]:
    """Read a number that is one for all layers, or one of each."""
    value = get(file, name)
    return value[:count] if isinstance(value, list) and len(value) >= count else [positive_integer(file, name)] * count

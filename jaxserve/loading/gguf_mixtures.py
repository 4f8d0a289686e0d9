"""Fields of config.json of GGUF files whose layers are Llama's with experts, or nearly so. No jax."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_decoder import (
    ATTENTION,
    SIGMOID,
    SOFTMAX,
    decoder_fields,
    has,
    layer_types,
    routing_fields,
    sizes,
    without_window,
)
from jaxserve.loading.gguf_keys import get, num_layers, number, positive_integer, refuse
from jaxserve.loading.gguf_rope import rope_fields

VALUE_SCALE = 0.707
"""`attention_value_scale` of the published MiMo V2 Flash."""


def mixture_fields(file: GGUFFile, *, gating: int = SIGMOID) -> dict[str, Any]:
    """Return how experts are chosen, in DeepSeek's names; the function of the scores may be left to llama.cpp."""
    refuse(file, expert_gating_func=gating)
    return {
        "moe_intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "first_k_dense_replace": get(file, "leading_dense_block_count", 0),
        "n_routed_experts": positive_integer(file, "expert_count"),
        "n_shared_experts": get(file, "expert_shared_count", 0),
        "num_experts_per_tok": positive_integer(file, "expert_used_count"),
        "n_group": positive_integer(file, "expert_group_count", 1),
        "topk_group": positive_integer(file, "expert_group_used_count", 1),
        "norm_topk_prob": get(file, "expert_weights_norm", False),
        "routed_scaling_factor": number(file, "expert_weights_scale", 1.0) or 1.0,
    }


def glm_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a GLM-4.5."""
    return without_window(file) | mixture_fields(file) | {"use_qk_norm": has(file, "attn_q_norm.weight")}


def dots_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a dots.llm1."""
    fields = without_window(file) | mixture_fields(file)
    return fields | {"layer_types": [ATTENTION] * fields["num_hidden_layers"]}


def bailing_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Ling 2."""
    fields = without_window(file) | mixture_fields(file)
    return fields | {
        "num_experts": fields["n_routed_experts"],
        "num_shared_experts": fields["n_shared_experts"],
        "moe_shared_expert_intermediate_size": positive_integer(
            file, "expert_shared_feed_forward_length", fields["moe_intermediate_size"]
        ),
        "moe_router_enable_expert_bias": has(file, "exp_probs_b.bias"),
        "use_qkv_bias": has(file, "attn_qkv.bias"),
    }


def bailing1_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Ling 1; where the rows of its LM head are normalised, those of the file are already."""
    fields = without_window(file) | mixture_fields(file, gating=SOFTMAX)
    return fields | {"num_experts": fields["n_routed_experts"], "num_shared_experts": fields["n_shared_experts"]}


def _mlp_layer_types(file: GGUFFile) -> list[str]:
    """Return which layers have experts: as in llama.cpp those that have a router."""
    has_router = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(num_layers(file))]
    return ["sparse" if found else "dense" for found in has_router]


def hy_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Hy3."""
    refuse(file, expert_weights_norm=True, expert_group_count=1)
    fields, experts = without_window(file), mixture_fields(file)
    size = experts["moe_intermediate_size"]
    return fields | {
        "moe_intermediate_size": size,
        "num_experts": experts["n_routed_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "num_shared_experts": positive_integer(file, "expert_shared_feed_forward_length", size) // size,
        "router_scaling_factor": experts["routed_scaling_factor"],
        "mlp_layer_types": _mlp_layer_types(file),
    }


def mellum_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Mellum 2: all layers have experts; those with a window have their own rotation."""
    fields = decoder_fields(file) | routing_fields(file)
    rope, count = fields["rope_parameters"], num_layers(file)
    local = {"rope_theta": number(file, "rope.freq_base_swa", rope["rope_theta"])}
    return fields | {
        "moe_intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "norm_topk_prob": True,  # in all of them, as in llama.cpp
        "layer_types": layer_types(file, 4) if fields["sliding_window"] else [ATTENTION] * count,
        "mlp_layer_types": ["sparse"] * count,
        "rope_parameters": {ATTENTION: rope, "sliding_attention": local},
    }


def trinity_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Trinity. As in llama.cpp, embeddings are scaled in all of them."""
    fields, experts = decoder_fields(file), mixture_fields(file)
    refuse(file, expert_weights_norm=True, expert_group_count=1)
    return fields | {
        "mup_enabled": True,
        "layer_types": layer_types(file, 4) if fields["sliding_window"] else [ATTENTION] * num_layers(file),
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "num_dense_layers": experts["first_k_dense_replace"],
        "num_experts": experts["n_routed_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "num_shared_experts": experts["n_shared_experts"],
        "route_scale": experts["routed_scaling_factor"],
    }


def exaone_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a K-EXAONE."""
    fields, experts = decoder_fields(file), mixture_fields(file)
    size = experts["moe_intermediate_size"]
    shared_size = positive_integer(file, "expert_shared_feed_forward_length", size * experts["n_shared_experts"])
    return fields | {
        **{name: experts[name] for name in ("norm_topk_prob", "num_experts_per_tok", "n_group", "topk_group")},
        "sliding_window": positive_integer(file, "attention.sliding_window", 128),  # as in llama.cpp
        "layer_types": layer_types(file, 4),
        "moe_intermediate_size": size,
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": shared_size // size,
        "routed_scaling_factor": experts["routed_scaling_factor"],
        "mlp_layer_types": _mlp_layer_types(file),
    }


def ernie_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an ERNIE 4.5 with experts."""
    refuse(file, expert_gating_func=SOFTMAX, expert_weights_scale=1.0)
    fields = without_window(file)
    return fields | {
        "use_bias": fields["attention_bias"],
        "moe_intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "moe_num_experts": positive_integer(file, "expert_count"),
        "moe_k": positive_integer(file, "expert_used_count"),
        "moe_num_shared_experts": get(file, "expert_shared_count", 0),
        "moe_layer_start_index": get(file, "leading_dense_block_count", 0),
        "moe_layer_interval": positive_integer(file, "interleave_moe_layer_step", 1),
    }


def hunyuan_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Hunyuan with experts."""
    size = positive_integer(file, "expert_feed_forward_length")
    refuse(file, expert_shared_feed_forward_length=size)
    return without_window(file) | routing_fields(file) | {"intermediate_size": size}


def qwen_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Qwen 2 or 3 with experts."""
    fields = without_window(file) | routing_fields(file)
    # Which of the two divides by the sum of the weights is hard-coded in llama.cpp.
    fields["norm_topk_prob"] = bool(get(file, "expert_weights_norm", file.architecture.startswith("qwen3")))
    fields["moe_intermediate_size"] = positive_integer(file, "expert_feed_forward_length")
    if file.architecture == "qwen2moe":
        fields["shared_expert_intermediate_size"] = positive_integer(file, "expert_shared_feed_forward_length")
    return fields | {"qkv_bias": fields["attention_bias"]}


def olmoe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an OLMoE."""
    is_normalized = bool(get(file, "expert_weights_norm", False))
    return without_window(file) | routing_fields(file) | {"norm_topk_prob": is_normalized}


def minimax_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a MiniMax M2."""
    refuse(file, expert_weights_norm=True)
    size = positive_integer(file, "expert_feed_forward_length")
    return without_window(file) | routing_fields(file, gating=SIGMOID) | {"intermediate_size": size}


def mimo_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a MiMo V2 Flash.

    llama.cpp's first converter left out the factor of values: then it is that of the published model.
    """
    refuse(file, expert_weights_norm=True)
    head_dim = positive_integer(file, "attention.key_length")
    value_dim = positive_integer(file, "attention.value_length", head_dim)
    refuse(file, **{"attention.key_length_swa": head_dim, "attention.value_length_swa": value_dim})
    rope = rope_fields(file, head_dim)
    if "rope_type" in rope:
        raise CheckpointError(f"{file.path}: mimo2.rope.scaling ({rope['rope_type']}) is not supported")
    file.require("mimo2.attention.sliding_window_pattern", list)  # one number would be that of all layers
    types = layer_types(file, 0)
    num_kv_heads, local_kv_heads = _kv_heads_by_type(file, types)
    return sizes(file) | {
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "num_key_value_heads": num_kv_heads,
        "swa_num_key_value_heads": local_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": value_dim,
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "attention_bias": has(file, "attn_q.bias") or has(file, "attn_qkv.bias"),
        "attention_value_scale": number(file, "attention.value_scale", VALUE_SCALE) or 1.0,
        "sliding_window_size": positive_integer(file, "attention.sliding_window"),
        "layer_types": types,
        "mlp_layer_types": _mlp_layer_types(file),
        "rope_parameters": {
            ATTENTION: rope,
            "sliding_attention": rope | {"rope_theta": number(file, "rope.freq_base_swa")},
        },
        **mixture_fields(file),
        "norm_topk_prob": True,  # in all of them, as in llama.cpp
    }


def _kv_heads_by_type(file: GGUFFile, types: list[str]) -> tuple[int, int]:
    """Return the KV heads of layers that see everything, and of those with a window."""
    name = "attention.head_count_kv"
    by_layer = get(file, name)
    if not isinstance(by_layer, list):
        count = positive_integer(file, name)
        return count, count
    full, local = (
        {count for count, each in zip(by_layer, types, strict=False) if each == kind}
        for kind in (ATTENTION, "sliding_attention")
    )
    if len(by_layer) < len(types) or len(full) > 1 or len(local) > 1:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.{name} {by_layer!r:.100} must have the same number for all of "
            f"{len(types)} layers with a window, and for all others"
        )
    return min(full or local), min(local or full)

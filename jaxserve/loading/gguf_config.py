"""Convert the metadata of a GGUF file to the fields of config.json. No jax."""

import math
import pathlib
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_keys import check_numbers, get, number, positive_integer, refuse
from jaxserve.loading.gguf_rope import rope_fields
from jaxserve.loading.gguf_tokenizer import end_token_ids

NOT_SERVED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "nextn_predict_layers",
    "residual_scale",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Keys of an architecture that change what it computes, and that not every family supports."""

SERVED = {
    "command-r": ("logit_scale",),
    "deepseek2": ("expert_count",),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("final_logit_softcapping",),
    "gpt-oss": ("expert_count",),
    "granite": ("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    "llama": ("expert_count",),
    "minimax-m2": ("expert_count",),
    "olmoe": ("expert_count",),
    "qwen2moe": ("expert_count",),
    "qwen3moe": ("expert_count",),
}
"""Keys of NOT_SERVED that are supported for some architectures."""

MODEL_TYPES = {
    "chatglm": "glm",
    "command-r": "cohere",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "minimax-m2": "minimax_m2",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
"""Architectures whose `model_type` has another name."""

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of expert_gating_func."""


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Return the fields of a config.json of this model. Raises CheckpointError, naming what is missing or not
    supported.
    """
    file = GGUFFile(path)
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: unknown architecture {file.architecture!r}; known are {known}")
    check_numbers(file)
    for name in NOT_SERVED:
        if name not in SERVED.get(file.architecture, ()) and get(file, name):
            raise CheckpointError(f"{file.path}: {file.architecture}.{name} {get(file, name)!r} is not supported")
    if not get(file, "attention.causal", True):
        raise CheckpointError(f"{file.path}: {file.architecture}.attention.causal False is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("; ".join([f"{file.path} has no tensor token_embd.weight", *file.problems]))
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    model_type = MODEL_TYPES.get(file.architecture, file.architecture)
    return (
        {"model_type": model_type}
        | ARCHITECTURES[file.architecture](file)
        | {
            "vocab_size": vocab_size,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "eos_token_id": list(end_token_ids(file.metadata)),
            "dtype": _dtype(file),
        }
    )


def _dtype(file: GGUFFile) -> str:
    """Return the dtype that holds most values; for quantized ones bfloat16, which most of them were made from."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + math.prod(tensor.shape)
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=sizes.__getitem__), "bfloat16")


def _decoder_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a relative of Llama with RMS norms."""
    return _fields(file) | {"rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon")}


def _fields(file: GGUFFile) -> dict[str, Any]:
    hidden_size, num_heads = positive_integer(file, "embedding_length"), positive_integer(file, "attention.head_count")
    head_dim = positive_integer(file, "attention.key_length", max(hidden_size // num_heads, 1))
    if positive_integer(file, "attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: keys and values of different lengths are not supported")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "num_hidden_layers": positive_integer(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": positive_integer(file, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": positive_integer(file, "context_length"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": get(file, "attention.sliding_window") or None,
        "rope_parameters": rope_fields(file, head_dim),
    }


def _without_window(file: GGUFFile) -> dict[str, Any]:
    return _refuse_window(file, _decoder_fields(file))


def _layer_norm_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a relative of Llama with layer norms."""
    return _refuse_window(file, _fields(file) | {"layer_norm_eps": number(file, "attention.layer_norm_epsilon")})


def _refuse_window(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    if fields["sliding_window"]:
        name = f"{file.architecture}.attention.sliding_window"
        raise CheckpointError(f"{file.path}: {name} {fields['sliding_window']} is not supported")
    return fields


def _llama_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Llama, or of a Mixtral, which is a llama too."""
    fields = _without_window(file)
    return fields | {"model_type": "mixtral", **_routing_fields(file)} if get(file, "expert_count") else fields


def _qwen_moe_fields(file: GGUFFile) -> dict[str, Any]:
    fields = _without_window(file) | _routing_fields(file)
    # Which of the two divides by the sum of the weights is hard-coded in llama.cpp.
    fields["norm_topk_prob"] = bool(get(file, "expert_weights_norm", file.architecture == "qwen3moe"))
    fields["moe_intermediate_size"] = positive_integer(file, "expert_feed_forward_length")
    if file.architecture == "qwen2moe":
        fields["shared_expert_intermediate_size"] = positive_integer(file, "expert_shared_feed_forward_length")
    return fields | {"qkv_bias": fields["attention_bias"]}


def _olmoe_fields(file: GGUFFile) -> dict[str, Any]:
    is_normalized = bool(get(file, "expert_weights_norm", False))
    return _without_window(file) | _routing_fields(file) | {"norm_topk_prob": is_normalized}


def _minimax_fields(file: GGUFFile) -> dict[str, Any]:
    refuse(file, expert_weights_norm=True)
    size = positive_integer(file, "expert_feed_forward_length")
    return _without_window(file) | _routing_fields(file, gating=SIGMOID) | {"intermediate_size": size}


def _routing_fields(file: GGUFFile, *, gating: int = SOFTMAX) -> dict[str, Any]:
    refuse(file, expert_gating_func=gating, expert_group_count=1, expert_weights_scale=1.0, leading_dense_block_count=0)
    return {
        "num_experts": positive_integer(file, "expert_count"),
        "num_experts_per_tok": positive_integer(file, "expert_used_count"),
    }


def _phi3_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Phi 3; its config.json has the original context next to LongRoPE's parameters."""
    fields = _decoder_fields(file)
    original = fields["rope_parameters"].get("original_max_position_embeddings", fields["max_position_embeddings"])
    return fields | {"original_max_position_embeddings": original}


def _granite_fields(file: GGUFFile) -> dict[str, Any]:
    fields = _without_window(file)
    return fields | {
        "embedding_multiplier": number(file, "embedding_scale", 1.0),
        "attention_multiplier": number(file, "attention.scale", fields["head_dim"] ** -0.5),
        "residual_multiplier": number(file, "residual_scale", 1.0),
        "logits_scaling": number(file, "logit_scale", 1.0),
    }


def _cohere_fields(file: GGUFFile) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in file.tensors
    return _layer_norm_fields(file) | {"use_qk_norm": has_norms, "logit_scale": number(file, "logit_scale")}


def _stablelm_fields(file: GGUFFile) -> dict[str, Any]:
    fields = _layer_norm_fields(file)
    return fields | {
        "use_qkv_bias": fields["attention_bias"],
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
    }


def _falcon_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Falcon. All kinds that llama.cpp supports are of the newer architecture, with one KV head
    or more.
    """
    fields = _layer_norm_fields(file)
    return fields | {
        "new_decoder_architecture": True,
        "num_kv_heads": fields["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1,
        "ffn_hidden_size": fields["intermediate_size"],
        "layer_norm_epsilon": fields["layer_norm_eps"],
    }


def _bloom_fields(file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_size": positive_integer(file, "embedding_length"),
        "n_layer": positive_integer(file, "block_count"),
        "n_head": positive_integer(file, "attention.head_count"),
        "seq_length": positive_integer(file, "context_length"),
        "layer_norm_epsilon": number(file, "attention.layer_norm_epsilon"),
    }


def _starcoder2_fields(file: GGUFFile) -> dict[str, Any]:
    epsilon = number(file, "attention.layer_norm_epsilon")
    return _fields(file) | {"norm_epsilon": epsilon, "use_bias": "blk.0.attn_output.bias" in file.tensors}


def _gemma2_fields(file: GGUFFile) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": get(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get(file, "final_logit_softcapping", 30.0),
    }
    return _decoder_fields(file) | _hybrid_fields(file, period=2, num_layers_of_27b=46) | caps


def _gemma3_fields(file: GGUFFile) -> dict[str, Any]:
    fields = _decoder_fields(file)
    if fields["sliding_window"] is None:
        raise CheckpointError(f"{file.path}: gemma3.attention.sliding_window is missing")
    local = {"rope_theta": get(file, "rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    cap = {"final_logit_softcapping": get(file, "final_logit_softcapping")}
    return fields | _hybrid_fields(file, period=6, num_layers_of_27b=62) | cap | {"rope_parameters": ropes}


def _hybrid_fields(file: GGUFFile, *, period: int, num_layers_of_27b: int) -> dict[str, Any]:
    """Return which layers of a Gemma have the window, and the scale of its scores; both are hard-coded in llama.cpp
    too.

    Every `period`-th layer attends to everything. The largest model divides scores by the root of another number.
    """
    num_layers, num_heads = positive_integer(file, "block_count"), positive_integer(file, "attention.head_count")
    hidden_size = positive_integer(file, "embedding_length")
    head_dim = positive_integer(file, "attention.key_length", max(hidden_size // num_heads, 1))
    return {
        "sliding_window": positive_integer(file, "attention.sliding_window", 4096),
        "layer_types": _layer_types(file, period),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == num_layers_of_27b else head_dim,
    }


def _layer_types(file: GGUFFile, period: int) -> list[str]:
    """Return the type of each layer; every `period`-th attends to everything unless the file says otherwise."""
    pattern = get(file, "attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = positive_integer(file, "attention.sliding_window_pattern", period)
        pattern = [(index + 1) % period for index in range(positive_integer(file, "block_count"))]
    return ["sliding_attention" if is_local else "full_attention" for is_local in pattern]


def _deepseek_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of V2, whose files may omit that it routes by softmax, or of V3 and R1, which route by sigmoid.

    If a file omits the number of groups of experts, as older ones do, it is one, as in llama.cpp.
    """
    is_v3 = get(file, "expert_gating_func") == SIGMOID
    if not is_v3:
        refuse(file, expert_gating_func=SOFTMAX, expert_weights_norm=False)
    num_groups = positive_integer(file, "expert_group_count", 1)
    rotated = positive_integer(file, "rope.dimension_count")
    return {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "hidden_size": positive_integer(file, "embedding_length"),
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "moe_intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "num_hidden_layers": positive_integer(file, "block_count"),
        "num_attention_heads": positive_integer(file, "attention.head_count"),
        "max_position_embeddings": positive_integer(file, "context_length"),
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "q_lora_rank": get(file, "attention.q_lora_rank") or None,
        "kv_lora_rank": positive_integer(file, "attention.kv_lora_rank"),
        "qk_nope_head_dim": _length_of_heads(file, "attention.key_length") - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": _length_of_heads(file, "attention.value_length"),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors,
        "mlp_bias": any(name.endswith((".ffn_up.bias", ".ffn_up_shexp.bias")) for name in file.tensors),
        "first_k_dense_replace": get(file, "leading_dense_block_count", 0),
        "n_routed_experts": positive_integer(file, "expert_count"),
        "n_shared_experts": get(file, "expert_shared_count", 0),
        "num_experts_per_tok": positive_integer(file, "expert_used_count"),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": "noaux_tc" if is_v3 else "greedy" if num_groups == 1 else "group_limited_greedy",
        "n_group": num_groups,
        "topk_group": positive_integer(file, "expert_group_used_count", 1),
        "norm_topk_prob": get(file, "expert_weights_norm", False),
        "routed_scaling_factor": number(file, "expert_weights_scale", 1.0) or 1.0,
        "rope_parameters": rope_fields(file, rotated),
    }


def _length_of_heads(file: GGUFFile, name: str) -> int:
    """Read the size of a head. In files that split the latents' keys and values, `name` is the cached size, and the
    heads' own is under *_mla.
    """
    own = f"{name}_mla"
    return positive_integer(file, name if get(file, own) is None else own)


def _gpt_oss_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a GPT-OSS. The gate's clamp, the kind of routing and YaRN's unrounded range are the same in
    all.
    """
    fields = _decoder_fields(file) | _routing_fields(file, gating=SOFTMAX_OF_CHOSEN)
    refuse(file, **{"rope.freq_base_swa": fields["rope_parameters"]["rope_theta"]})
    return fields | {
        "intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "sliding_window": positive_integer(file, "attention.sliding_window"),
        "layer_types": _layer_types(file, 2),
        "rope_parameters": fields["rope_parameters"] | {"truncate": False},
    }


def _glm_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of GLM, and of ChatGLM 2 and later, whose files have q, k and v as one matrix."""
    return _without_window(file) | {
        "attention_bias": any(f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv"))
    }


def _ernie_fields(file: GGUFFile) -> dict[str, Any]:
    fields = _without_window(file)
    return fields | {"use_bias": fields["attention_bias"]}


def _seed_oss_fields(file: GGUFFile) -> dict[str, Any]:
    return _without_window(file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _gpt_neox_fields(file: GGUFFile) -> dict[str, Any]:
    return _layer_norm_fields(file) | {
        "attention_bias": "blk.0.attn_qkv.bias" in file.tensors,
        "use_parallel_residual": get(file, "use_parallel_residual", True),
    }


def _gptj_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a GPT-J by the format's specification and the `gguf` package: llama.cpp does not write such
    files.
    """
    refuse(file, **{"rope.freq_base": 10000.0, "rope.scaling.type": "none", "rope.scale_linear": 1.0})
    fields = _gpt2_fields(file, inner_default=4 * positive_integer(file, "embedding_length"))
    return fields | {"rotary_dim": positive_integer(file, "rope.dimension_count")}


def _gpt2_fields(file: GGUFFile, *, inner_default: int | None = None) -> dict[str, Any]:
    return {
        "n_embd": positive_integer(file, "embedding_length"),
        "n_inner": positive_integer(file, "feed_forward_length", inner_default),
        "n_layer": positive_integer(file, "block_count"),
        "n_head": positive_integer(file, "attention.head_count"),
        "n_positions": positive_integer(file, "context_length"),
        "layer_norm_epsilon": number(file, "attention.layer_norm_epsilon"),
    }


ARCHITECTURES = {
    "arcee": _without_window,
    "bloom": _bloom_fields,
    "chatglm": _glm_fields,
    "command-r": _cohere_fields,
    "deepseek2": _deepseek_fields,
    "ernie4_5": _ernie_fields,
    "falcon": _falcon_fields,
    "gemma": _without_window,
    "gemma2": _gemma2_fields,
    "gemma3": _gemma3_fields,
    "glm4": _without_window,
    "gpt-oss": _gpt_oss_fields,
    "gpt2": _gpt2_fields,
    "gptj": _gptj_fields,
    "gptneox": _gpt_neox_fields,
    "granite": _granite_fields,
    "llama": _llama_fields,
    "minimax-m2": _minimax_fields,
    "olmo2": _without_window,
    "olmoe": _olmoe_fields,
    "phi2": _layer_norm_fields,
    "phi3": _phi3_fields,
    "qwen2": _without_window,
    "qwen2moe": _qwen_moe_fields,
    "qwen3": _without_window,
    "qwen3moe": _qwen_moe_fields,
    "seed_oss": _seed_oss_fields,
    "stablelm": _stablelm_fields,
    "starcoder2": _starcoder2_fields,
}
"""The reader of each architecture's fields, by llama.cpp's names; a Mistral is a llama."""

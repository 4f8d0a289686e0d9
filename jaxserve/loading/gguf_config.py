"""Convert the metadata of a GGUF file to the fields of config.json. No jax."""

import math
import pathlib
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading import gguf_families, gguf_mixtures
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_decoder import (
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    common_fields,
    decoder_fields,
    has,
    layer_norm_fields,
    layer_types,
    routing_fields,
    without_window,
)
from jaxserve.loading.gguf_keys import check_numbers, get, num_layers, number, positive_integer, refuse
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
    "residual_scale",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Keys of an architecture that change what it computes, and that not every family supports."""

_GRANITE = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
SERVED = {
    "bailingmoe": ("expert_count",),
    "bailingmoe2": ("expert_count",),
    "cohere2": ("logit_scale",),
    "command-r": ("logit_scale",),
    "deepseek2": ("expert_count",),
    "dots1": ("expert_count",),
    "ernie4_5-moe": ("expert_count",),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("final_logit_softcapping",),
    "gpt-oss": ("expert_count",),
    "gemma4": ("expert_count", "final_logit_softcapping"),
    "glm4moe": ("expert_count",),
    "granite": _GRANITE,
    "granitehybrid": ("expert_count", *_GRANITE),
    "granitemoe": ("expert_count", *_GRANITE),
    "hunyuan-moe": ("expert_count",),
    "hy_v3": ("expert_count",),
    "lfm2moe": ("expert_count",),
    "llama": ("expert_count",),
    "llama4": ("expert_count",),
    "mellum": ("expert_count",),
    "minimax-m2": ("expert_count",),
    "mistral3": ("attention.temperature_scale",),
    "nemotron_h_moe": ("expert_count",),
    "olmoe": ("expert_count",),
    "phimoe": ("expert_count",),
    "qwen2moe": ("expert_count",),
    "qwen35moe": ("expert_count",),
    "qwen3moe": ("expert_count",),
    "qwen3next": ("expert_count",),
    "qwen3vlmoe": ("expert_count",),
}
"""Keys of NOT_SERVED that are supported for some architectures."""

MODEL_TYPES = {
    "bailingmoe": "bailing_moe",
    "bailingmoe2": "bailing_moe_v2",
    "chatglm": "glm",
    "command-r": "cohere",
    "ernie4_5-moe": "ernie4_5_moe",
    "falcon-h1": "falcon_h1",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
    "granitehybrid": "granitemoehybrid",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "lfm2moe": "lfm2_moe",
    "llama4": "llama4_text",
    "minimax-m2": "minimax_m2",
    "mistral3": "ministral3",
    "nemotron_h_moe": "nemotron_h",
    "phi2": "phi",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
}
"""Architectures whose `model_type` has another name."""


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


def _llama_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Llama, or of a Mixtral, which is a llama too."""
    fields = without_window(file)
    return fields | {"model_type": "mixtral", **routing_fields(file)} if get(file, "expert_count") else fields


def _phi3_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Phi 3; its config.json has the original context next to LongRoPE's parameters."""
    fields = decoder_fields(file)
    original = fields["rope_parameters"].get("original_max_position_embeddings", fields["max_position_embeddings"])
    return fields | {"original_max_position_embeddings": original}


def _phi_moe_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Phi-3.5 MoE, which has a factor of rotated vectors for either list of factors; a file has
    one for both.
    """
    fields: dict[str, Any] = _phi3_fields(file) | routing_fields(file) | {"lm_head_bias": "output.bias" in file.tensors}
    rope: dict[str, Any] = fields["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        rope |= dict.fromkeys(("short_mscale", "long_mscale"), rope.pop("attention_factor", 1.0))
    return fields


def _cohere_fields(file: GGUFFile) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in file.tensors
    return layer_norm_fields(file) | {"use_qk_norm": has_norms, "logit_scale": number(file, "logit_scale")}


def _stablelm_fields(file: GGUFFile) -> dict[str, Any]:
    fields = layer_norm_fields(file)
    return fields | {
        "use_qkv_bias": fields["attention_bias"],
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
    }


def _falcon_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Falcon. All kinds that llama.cpp supports are of the newer architecture, with one KV head
    or more.
    """
    fields = layer_norm_fields(file)
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
    return common_fields(file) | {"norm_epsilon": epsilon, "use_bias": "blk.0.attn_output.bias" in file.tensors}


def _gemma2_fields(file: GGUFFile) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": get(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get(file, "final_logit_softcapping", 30.0),
    }
    return decoder_fields(file) | _hybrid_fields(file, period=2, num_layers_of_27b=46) | caps


def _gemma3_fields(file: GGUFFile) -> dict[str, Any]:
    fields = decoder_fields(file)
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
        "layer_types": layer_types(file, period),
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == num_layers_of_27b else head_dim,
    }


def _deepseek_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of V2, whose files may omit that it routes by softmax, or of V3 and R1, which route by sigmoid.

    If a file omits the number of groups of experts, as older ones do, it is one, as in llama.cpp. Relatives of V3 may
    omit that they route by sigmoid, but have biases of the choice.
    """
    default = SIGMOID if has(file, "exp_probs_b.bias") else SOFTMAX
    is_v3 = get(file, "expert_gating_func", default) == SIGMOID
    if not is_v3:
        refuse(file, expert_weights_norm=False)
    num_groups = positive_integer(file, "expert_group_count", 1)
    rotated = positive_integer(file, "rope.dimension_count")
    return {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "hidden_size": positive_integer(file, "embedding_length"),
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "num_hidden_layers": num_layers(file),
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
        **gguf_mixtures.mixture_fields(file, gating=SIGMOID if is_v3 else SOFTMAX),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": "noaux_tc" if is_v3 else "greedy" if num_groups == 1 else "group_limited_greedy",
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
    fields = decoder_fields(file) | routing_fields(file, gating=SOFTMAX_OF_CHOSEN)
    return fields | {
        "intermediate_size": positive_integer(file, "expert_feed_forward_length"),
        "sliding_window": positive_integer(file, "attention.sliding_window"),
        "layer_types": layer_types(file, 2),
        "rope_parameters": fields["rope_parameters"] | {"truncate": False},
    }


def _glm_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of GLM, and of ChatGLM 2 and later, whose files have q, k and v as one matrix."""
    return without_window(file) | {
        "attention_bias": any(f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv"))
    }


def _ernie_fields(file: GGUFFile) -> dict[str, Any]:
    fields = without_window(file)
    return fields | {"use_bias": fields["attention_bias"]}


def _seed_oss_fields(file: GGUFFile) -> dict[str, Any]:
    return without_window(file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _gpt_neox_fields(file: GGUFFile) -> dict[str, Any]:
    return layer_norm_fields(file) | {
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
    "apertus": gguf_families.apertus_fields,
    "arcee": without_window,
    "baichuan": gguf_families.baichuan_fields,
    "bailingmoe": gguf_mixtures.bailing1_fields,
    "bailingmoe2": gguf_mixtures.bailing_fields,
    "bloom": _bloom_fields,
    "chatglm": _glm_fields,
    "cohere2": gguf_families.cohere2_fields,
    "command-r": _cohere_fields,
    "deepseek2": _deepseek_fields,
    "dots1": gguf_mixtures.dots_fields,
    "ernie4_5": _ernie_fields,
    "ernie4_5-moe": gguf_mixtures.ernie_moe_fields,
    "exaone4": gguf_families.exaone_fields,
    "falcon": _falcon_fields,
    "falcon-h1": gguf_families.falcon_h1_fields,
    "gemma": without_window,
    "gemma2": _gemma2_fields,
    "gemma3": _gemma3_fields,
    "gemma4": gguf_families.gemma4_fields,
    "glm4": without_window,
    "glm4moe": gguf_mixtures.glm_moe_fields,
    "gpt-oss": _gpt_oss_fields,
    "gpt2": _gpt2_fields,
    "gptj": _gptj_fields,
    "gptneox": _gpt_neox_fields,
    "granite": gguf_families.granite_fields,
    "granitehybrid": gguf_families.granite_hybrid_fields,
    "granitemoe": gguf_families.granite_moe_fields,
    "hunyuan-dense": gguf_families.hunyuan_fields,
    "hunyuan-moe": gguf_mixtures.hunyuan_moe_fields,
    "hy_v3": gguf_mixtures.hy_fields,
    "lfm2": gguf_families.lfm_fields,
    "lfm2moe": gguf_families.lfm_fields,
    "llama": _llama_fields,
    "llama4": gguf_families.llama4_fields,
    "mamba2": gguf_families.mamba_fields,
    "mellum": gguf_mixtures.mellum_fields,
    "minimax-m2": gguf_mixtures.minimax_fields,
    "mistral3": gguf_families.ministral_fields,
    "nemotron_h": gguf_families.nemotron_fields,
    "nemotron_h_moe": gguf_families.nemotron_fields,
    "olmo2": gguf_families.olmo_fields,
    "olmoe": gguf_mixtures.olmoe_fields,
    "phi2": layer_norm_fields,
    "phi3": _phi3_fields,
    "phimoe": _phi_moe_fields,
    "qwen": gguf_families.qwen1_fields,
    "qwen2": without_window,
    "qwen2moe": gguf_mixtures.qwen_moe_fields,
    "qwen2vl": without_window,
    "qwen3": without_window,
    "qwen35": gguf_families.delta_net_fields,
    "qwen35moe": gguf_families.delta_net_fields,
    "qwen3moe": gguf_mixtures.qwen_moe_fields,
    "qwen3next": gguf_families.delta_net_fields,
    "qwen3vl": without_window,
    "qwen3vlmoe": gguf_mixtures.qwen_moe_fields,
    "seed_oss": _seed_oss_fields,
    "smollm3": without_window,
    "stablelm": _stablelm_fields,
    "starcoder2": _starcoder2_fields,
}
"""The reader of each architecture's fields, by llama.cpp's names; a Mistral is a llama."""

"""Convert the metadata of a GGUF file to the fields of config.json. No jax."""

import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.errors import CheckpointError
from jaxserve.loading import gguf_families, gguf_latents, gguf_mixtures
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_decoder import (
    SOFTMAX_OF_CHOSEN,
    common_fields,
    decoder_fields,
    layer_norm_fields,
    layer_types,
    routing_fields,
    without_window,
)
from jaxserve.loading.gguf_keys import check_numbers, get, number, positive_integer, refuse
from jaxserve.loading.gguf_tokenizer import end_token_ids

NOT_SERVED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.scale",
    "attention.temperature_length",
    "attention.temperature_scale",
    "attention.value_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "expert_group_scale",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Keys of an architecture that change what it computes, and that not every family supports."""


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Return the fields of a config.json of this model. Raises CheckpointError, naming what is missing or not
    supported.
    """
    file = GGUFFile(path)
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: unknown architecture {file.architecture!r}; known are {known}")
    check_numbers(file)
    architecture = ARCHITECTURES[file.architecture]
    for name in NOT_SERVED:
        if name not in architecture.served and get(file, name):
            raise CheckpointError(f"{file.path}: {file.architecture}.{name} {get(file, name)!r} is not supported")
    if not get(file, "attention.causal", True):
        raise CheckpointError(f"{file.path}: {file.architecture}.attention.causal False is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("; ".join([f"{file.path} has no tensor token_embd.weight", *file.problems]))
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    return (
        {"model_type": architecture.model_type or file.architecture}
        | architecture.fields(file)
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


def _nemotron_fields(file: GGUFFile) -> dict[str, Any]:
    fields = layer_norm_fields(file)
    return fields | {"norm_eps": fields["layer_norm_eps"]}


def _olmo_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of an OLMo 1, whose norms have one epsilon in all. The converter reorders no biases."""
    fields = layer_norm_fields(file)
    if round(fields["layer_norm_eps"], 9) != OLMO_EPSILON or fields["attention_bias"]:
        raise CheckpointError(f"{file.path}: biases, or an epsilon other than {OLMO_EPSILON}, are not supported")
    return fields | {"clip_qkv": get(file, "attention.clamp_kqv") or None}


OLMO_EPSILON = 1e-5


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


class Architecture(NamedTuple):
    """How files of an architecture are read.

    `fields` returns most of the fields of their config.json. `model_type` is the one there, if it is not the
    architecture's name. `served` are keys of NOT_SERVED that are supported.
    """

    fields: Callable[[GGUFFile], dict[str, Any]]
    model_type: str | None = None
    served: tuple[str, ...] = ()


_EXPERTS = ("expert_count",)
_TEMPERATURE = ("attention.temperature_length", "attention.temperature_scale")
_GRANITE = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
ARCHITECTURES = {
    "afmoe": Architecture(gguf_mixtures.trinity_fields, served=_EXPERTS),
    "apertus": Architecture(gguf_families.apertus_fields),
    "arcee": Architecture(without_window),
    "baichuan": Architecture(gguf_families.baichuan_fields),
    "bailingmoe": Architecture(gguf_mixtures.bailing1_fields, "bailing_moe", _EXPERTS),
    "bailingmoe2": Architecture(gguf_mixtures.bailing_fields, "bailing_moe_v2", _EXPERTS),
    "bloom": Architecture(_bloom_fields),
    "chatglm": Architecture(_glm_fields, "glm"),
    "cohere2": Architecture(gguf_families.cohere2_fields, served=("logit_scale",)),
    "command-r": Architecture(_cohere_fields, "cohere", ("logit_scale",)),
    "deepseek2": Architecture(gguf_latents.deepseek_fields, served=_EXPERTS),
    "dots1": Architecture(gguf_mixtures.dots_fields, served=_EXPERTS),
    "ernie4_5": Architecture(_ernie_fields),
    "ernie4_5-moe": Architecture(gguf_mixtures.ernie_moe_fields, "ernie4_5_moe", _EXPERTS),
    "exaone-moe": Architecture(gguf_mixtures.exaone_moe_fields, "exaone_moe", _EXPERTS),
    "exaone4": Architecture(gguf_families.exaone_fields),
    "falcon": Architecture(_falcon_fields),
    "falcon-h1": Architecture(gguf_families.falcon_h1_fields, "falcon_h1"),
    "gemma": Architecture(without_window),
    "gemma2": Architecture(_gemma2_fields, served=("attn_logit_softcapping", "final_logit_softcapping")),
    "gemma3": Architecture(_gemma3_fields, "gemma3_text", ("final_logit_softcapping",)),
    "gemma3n": Architecture(gguf_families.gemma3n_fields, "gemma3n_text", ("final_logit_softcapping",)),
    "gemma4": Architecture(gguf_families.gemma4_fields, "gemma4_text", ("expert_count", "final_logit_softcapping")),
    "glm4": Architecture(without_window),
    "glm4moe": Architecture(gguf_mixtures.glm_moe_fields, "glm4_moe", _EXPERTS),
    "gpt-oss": Architecture(_gpt_oss_fields, "gpt_oss", _EXPERTS),
    "gpt2": Architecture(_gpt2_fields),
    "gptj": Architecture(_gptj_fields),
    "gptneox": Architecture(_gpt_neox_fields, "gpt_neox"),
    "granite": Architecture(gguf_families.granite_fields, served=_GRANITE),
    "granitehybrid": Architecture(gguf_families.granite_hybrid_fields, "granitemoehybrid", (*_EXPERTS, *_GRANITE)),
    "granitemoe": Architecture(gguf_families.granite_moe_fields, served=(*_EXPERTS, *_GRANITE)),
    "hunyuan-dense": Architecture(gguf_families.hunyuan_fields, "hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(gguf_mixtures.hunyuan_moe_fields, "hunyuan_v1_moe", _EXPERTS),
    "hy_v3": Architecture(gguf_mixtures.hy_fields, served=_EXPERTS),
    "jais2": Architecture(layer_norm_fields),
    "kimi-linear": Architecture(gguf_families.kimi_linear_fields, "kimi_linear", _EXPERTS),
    "lfm2": Architecture(gguf_families.lfm_fields),
    "lfm2moe": Architecture(gguf_families.lfm_fields, "lfm2_moe", _EXPERTS),
    "llama": Architecture(_llama_fields, served=_EXPERTS),
    "llama4": Architecture(gguf_families.llama4_fields, "llama4_text", _EXPERTS),
    "mamba2": Architecture(gguf_families.mamba_fields),
    "mellum": Architecture(gguf_mixtures.mellum_fields, served=_EXPERTS),
    "mimo2": Architecture(gguf_mixtures.mimo_fields, "mimo_v2_flash", (*_EXPERTS, "attention.value_scale")),
    "minimax-m2": Architecture(gguf_mixtures.minimax_fields, "minimax_m2", _EXPERTS),
    "mistral3": Architecture(gguf_families.ministral_fields, "ministral3", ("attention.temperature_scale",)),
    "mistral4": Architecture(gguf_latents.mistral_fields, served=(*_EXPERTS, *_TEMPERATURE)),
    "nemotron": Architecture(_nemotron_fields),
    "nemotron_h": Architecture(gguf_families.nemotron_fields),
    "nemotron_h_moe": Architecture(gguf_families.nemotron_fields, "nemotron_h", _EXPERTS),
    "olmo": Architecture(_olmo_fields, served=("attention.clamp_kqv",)),
    "olmo2": Architecture(gguf_families.olmo_fields),
    "olmoe": Architecture(gguf_mixtures.olmoe_fields, served=_EXPERTS),
    "phi2": Architecture(layer_norm_fields, "phi"),
    "phi3": Architecture(_phi3_fields),
    "phimoe": Architecture(_phi_moe_fields, served=_EXPERTS),
    "qwen": Architecture(gguf_families.qwen1_fields),
    "qwen2": Architecture(without_window),
    "qwen2moe": Architecture(gguf_mixtures.qwen_moe_fields, "qwen2_moe", _EXPERTS),
    "qwen2vl": Architecture(without_window, "qwen2"),
    "qwen3": Architecture(without_window),
    "qwen35": Architecture(gguf_families.delta_net_fields, "qwen3_5_text"),
    "qwen35moe": Architecture(gguf_families.delta_net_fields, "qwen3_5_moe_text", _EXPERTS),
    "qwen3moe": Architecture(gguf_mixtures.qwen_moe_fields, "qwen3_moe", _EXPERTS),
    "qwen3next": Architecture(gguf_families.delta_net_fields, "qwen3_next", _EXPERTS),
    "qwen3vl": Architecture(without_window, "qwen3"),
    "qwen3vlmoe": Architecture(gguf_mixtures.qwen_moe_fields, "qwen3_moe", _EXPERTS),
    "seed_oss": Architecture(_seed_oss_fields),
    "smollm3": Architecture(without_window),
    "stablelm": Architecture(_stablelm_fields),
    "starcoder2": Architecture(_starcoder2_fields),
}
"""All that are supported, by llama.cpp's names; a Mistral is a llama."""

"""Fields of config.json of GGUF files of models with latent attention and experts. No jax."""

import math
from typing import Any

from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_decoder import SIGMOID, SOFTMAX, has, sizes
from jaxserve.loading.gguf_keys import get, number, positive_integer, refuse
from jaxserve.loading.gguf_mixtures import mixture_fields
from jaxserve.loading.gguf_rope import rope_fields

QUERY_SCALE = 0.1
"""`llama_4_scaling_beta` of the published Mistral Small 4."""


def deepseek_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of V2, whose files may omit that it routes by softmax, or of V3 and R1, which route by sigmoid.

    If a file omits the number of groups of experts, as older ones do, it is one, as in llama.cpp. Relatives of V3 may
    omit that they route by sigmoid, but have biases of the choice.
    """
    default = SIGMOID if has(file, "exp_probs_b.bias") else SOFTMAX
    is_v3 = get(file, "expert_gating_func", default) == SIGMOID
    if not is_v3:
        refuse(file, expert_weights_norm=False)
    fields = _latent_fields(file, gating=SIGMOID if is_v3 else SOFTMAX)
    return fields | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": "noaux_tc" if is_v3 else "greedy" if fields["n_group"] == 1 else "group_limited_greedy",
    }


def mistral_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a Mistral Small 4.

    llama.cpp's converter leaves out how queries grow beyond the original context: then they do as in the published
    model.
    """
    fields = _latent_fields(file, gating=SOFTMAX)
    rope, rotated = fields["rope_parameters"], fields["qk_rope_head_dim"]
    original = rope.get("original_max_position_embeddings", fields["max_position_embeddings"])
    refuse(file, **{"attention.temperature_length": original})
    return fields | {
        "rope_parameters": rope
        | {
            "partial_rotary_factor": math.nextafter(rotated / (fields["qk_nope_head_dim"] + rotated), 2.0),
            "llama_4_scaling_beta": number(file, "attention.temperature_scale", QUERY_SCALE),
        }
    }


def _latent_fields(file: GGUFFile, *, gating: int) -> dict[str, Any]:
    """Return the fields of a decoder with latent attention, shared experts and experts chosen by such scores."""
    refuse(file, **{"attention.sliding_window": 0})
    rotated = positive_integer(file, "rope.dimension_count")
    return sizes(file) | {
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "q_lora_rank": get(file, "attention.q_lora_rank") or None,
        "kv_lora_rank": positive_integer(file, "attention.kv_lora_rank"),
        "qk_nope_head_dim": _length_of_heads(file, "attention.key_length") - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": _length_of_heads(file, "attention.value_length"),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in file.tensors,
        "mlp_bias": any(name.endswith((".ffn_up.bias", ".ffn_up_shexp.bias")) for name in file.tensors),
        **mixture_fields(file, gating=gating),
        "rope_parameters": rope_fields(file, rotated),
    }


def _length_of_heads(file: GGUFFile, name: str) -> int:
    """Read the size of a head. In files that split the latents' keys and values, `name` is the cached size, and the
    heads' own is under *_mla.
    """
    own = f"{name}_mla"
    return positive_integer(file, name if get(file, own) is None else own)

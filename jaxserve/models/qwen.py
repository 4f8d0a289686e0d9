"""Qwen 1 (Bai et al. 2023, arXiv:2309.16609): Llama with biases on q, k and v, up to the context of its training."""

from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.models import gpt2, hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "kv_channels": 128, "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-06,
    "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "use_dynamic_ntk": True,
    "use_logn_attn": True, "no_bias": True
}  # fmt: skip
"""Defaults of this family's config in its own code, for fields that a config.json omits."""

REQUIRED = {
    "scale_attn_weights": True,
    "use_cache_quantization": False,
    "rope_parameters": None,  # its own code reads none of these two
    "rope_scaling": None,
}


def _read(fields: dict[str, Any]) -> DecoderConfig:
    hf_config.require(fields, **REQUIRED)
    head_dim = hf_config.integer(fields, "kv_channels")
    rope = {
        "max_position_embeddings": hf_config.integer(fields, "max_position_embeddings"),
        "rope_theta": hf_config.number(fields, "rotary_emb_base"),
        "partial_rotary_factor": hf_config.number(fields, "rotary_pct"),
    }
    has_biases = not hf_config.flag(fields, "no_bias")
    return read_config(
        DecoderConfig,
        fields,
        intermediate_size=hf_config.integer(fields, "intermediate_size", minimum=2) // 2,
        num_kv_heads=hf_config.integer(fields, "num_attention_heads"),
        head_dim=head_dim,
        max_position_embeddings=_context(fields),
        norm_eps=hf_config.number(fields, "layer_norm_epsilon"),
        activation="silu",
        qkv_bias=True,
        out_bias=has_biases,
        mlp_bias=has_biases,
        rope=hf_rope.rope(rope, size=head_dim, partial_rotary_factor=1.0),
    )


def _context(fields: dict[str, Any]) -> int:
    """Return the longest text that is served.

    Beyond `seq_length`, Qwen's own code stretches the rotations of all tokens (`use_dynamic_ntk`) and the queries of
    the later ones (`use_logn_attn`) by the length of each text. Neither does anything up to it, so texts end there.
    """
    context = hf_config.integer(fields, "max_position_embeddings")
    trained = hf_config.integer(fields, "seq_length", context)
    is_stretched = hf_config.flag(fields, "use_dynamic_ntk") or hf_config.flag(fields, "use_logn_attn")
    return min(context, trained) if is_stretched else context


NAMES = replace(gpt2.NAMES, gate_up=("w2", "w1"))
FAMILY = Family(DecoderConfig, DEFAULTS, _read, names=NAMES, doc=__doc__)

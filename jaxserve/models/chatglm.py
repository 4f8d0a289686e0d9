"""ChatGLM 2 and 3, GLM-4 9B in its first format (GLM Team 2024, arXiv:2406.12793): GLM with other names."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "num_layers": 28, "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128,
    "num_attention_heads": 32, "seq_length": 2048, "layernorm_epsilon": 1e-05, "multi_query_group_num": 1,
    "rope_ratio": 1.0
}  # fmt: skip
"""Defaults of this family's config in its own code, for fields that a config.json omits."""

REQUIRED = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "position_encoding_2d": False,  # of ChatGLM 1
    "pre_seq_len": None,
    "prefix_projection": False,
    "rope_parameters": None,  # its own code reads none of these two
    "rope_scaling": None,
}


def _read(fields: dict[str, Any]) -> DecoderConfig:
    hf_config.require(fields, **REQUIRED)
    if not hf_config.flag(fields, "multi_query_attention"):  # its own code's default, which no checkpoint has
        raise CheckpointError("config.json: multi_query_attention must be true")
    head_dim, context = (hf_config.integer(fields, name) for name in ("kv_channels", "seq_length"))
    _require_known_rotation(fields)
    theta = 10000.0 * hf_config.number(fields, "rope_ratio")
    rope = {"rope_theta": theta, "max_position_embeddings": context}
    has_biases = hf_config.flag(fields, "add_bias_linear")
    return read_config(
        DecoderConfig,
        fields,
        vocab_size=hf_config.integer(fields, "padded_vocab_size"),
        intermediate_size=hf_config.integer(fields, "ffn_hidden_size"),
        num_layers=hf_config.integer(fields, "num_layers"),
        num_kv_heads=hf_config.num_kv_heads(fields, "multi_query_group_num"),
        head_dim=head_dim,
        max_position_embeddings=context,
        norm_eps=hf_config.number(fields, "layernorm_epsilon"),
        activation="silu",
        qkv_bias=has_biases or hf_config.flag(fields, "add_qkv_bias"),
        out_bias=has_biases,
        mlp_bias=has_biases,
        rope=hf_rope.rope(rope, size=head_dim, partial_rotary_factor=0.5),
    )


def _require_known_rotation(fields: dict[str, Any]) -> None:
    """Refuse a `rope_ratio` that may divide positions, as in ChatGLM 2 32K. Others multiply the rotation's base by it.

    No field says which. GLM-4 has another vocabulary; ChatGLM 3 is known by its name alone.
    """
    ratio, name = hf_config.number(fields, "rope_ratio"), str(fields.get("_name_or_path"))
    if ratio != 1 and fields["padded_vocab_size"] == DEFAULTS["padded_vocab_size"] and "chatglm3" not in name.lower():
        raise CheckpointError(
            f"config.json: rope_ratio {ratio:g} is not supported for ChatGLM 2, which divides positions by it. For "
            f"ChatGLM 3, _name_or_path must contain 'chatglm3', got {name!r:.100}"
        )


NAMES = Names(
    embed="transformer.embedding.word_embeddings",
    layers="transformer.encoder.layers",
    norm="transformer.encoder.final_layernorm",
    lm_head="transformer.output_layer",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    is_interleaved=True,
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
FAMILY = Family(DecoderConfig, DEFAULTS, _read, names=NAMES, doc=__doc__)

"""LFM2 and LFM2.5 (Liquid AI 2025, arXiv:2511.23404): most layers have a gated short convolution, the others attend
with norms of queries and keys.
"""

import dataclasses
from dataclasses import replace
from typing import Any, override

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.layers.short_conv import ShortConvolution
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-05,
    "tie_word_embeddings": True, "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True
}  # fmt: skip

ALIASES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""Names of fields in published checkpoints."""

CONVOLUTION = "conv"
"""The kind of layers with a short convolution in `layer_types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one LFM2."""

    attends: tuple[bool, ...]
    width: int
    conv_bias: bool

    @property
    @override
    def layers(self) -> tuple[Layer, ...]:
        """The layers, dense."""
        convolution = ShortConvolution(num_channels=self.hidden_size, width=self.width, has_bias=self.conv_bias)
        convolving = replace(self.layer, mixer=convolution, mixer_name="conv")
        return tuple(self.layer if attends else convolving for attends in self.attends)


def _read(fields: dict[str, Any]) -> Config:
    return read_config(Config, fields, **own_fields(fields), intermediate_size=_inner_size(fields))


def own_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Read the fields of their own that both families have."""
    hf_config.require(fields, hidden_act="silu", block_use_swiglu=True, use_pos_enc=True)
    return {
        "activation": "silu",
        "head_norm": "shared",
        "norm_eps": hf_config.number(fields, "norm_eps"),
        "attends": _attending_layers(fields),
        "width": hf_config.integer(fields, "conv_L_cache", minimum=2),
        "rope": hf_rope.rope(fields, theta=1_000_000.0),
    }


def _attending_layers(fields: dict[str, Any]) -> tuple[bool, ...]:
    """Return which layers attend, from `layer_types`, or `full_attn_idxs`; by default all."""
    num_layers, indices = hf_config.integer(fields, "num_hidden_layers"), fields.get("full_attn_idxs")
    if indices is not None and not (isinstance(indices, list) and all(isinstance(index, int) for index in indices)):
        raise CheckpointError(f"config.json: full_attn_idxs must be a list of integers, got {indices!r:.100}")
    default = ["full_attention" if indices is None or index in indices else CONVOLUTION for index in range(num_layers)]
    kinds = hf_config.layer_kinds(fields, ("full_attention", CONVOLUTION), default)
    return tuple(kind != CONVOLUTION for kind in kinds)


def _inner_size(fields: dict[str, Any]) -> int:
    """Return the inner size of feed-forwards, which is by default two thirds of what the config says."""
    size = hf_config.integer(fields, "intermediate_size")
    if not hf_config.flag(fields, "block_auto_adjust_ff_dim"):
        return size
    size, multiple = int(2 * size / 3), hf_config.integer(fields, "block_multiple_of")
    return -(-int(hf_config.number(fields, "block_ffn_dim_multiplier") * size) // multiple) * multiple


NAMES = Names(
    norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    out="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
)
FEATURES = ("QK norm", "gated short convolutions")
FAMILY = Family(Config, DEFAULTS, _read, aliases=ALIASES, names=NAMES, doc=__doc__, features=FEATURES)

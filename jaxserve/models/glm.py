"""GLM (GLM Team 2024, arXiv:2406.12793): Llama with partial rotation, of neighbouring pairs."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.names import Names
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one GLM or GLM 4."""

    attention_bias: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            rope=hf_rope.rope(fields, partial_rotary_factor=0.5),
        )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, qkv_bias=config.attention_bias)
    return (replace(config.layer, mixer=attention),) * config.num_layers


NAMES = Names(gate_up=("gate_up_proj",), is_interleaved=True)
FAMILY = Family(Config=Config, layers=layers, names=NAMES, doc=__doc__)

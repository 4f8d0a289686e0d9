"""Llama 1, 2, 3 and 3.1 to 3.3 (Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783)."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import Attention
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""

OLD_NAMES = {"max_sequence_length": "max_position_embeddings"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Llama."""

    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS, old_names=OLD_NAMES)
        return read_config(cls, fields)


def attention(config: Config) -> Attention:
    """Return the attention block."""
    return replace(config.attention, qkv_bias=config.attention_bias, out_bias=config.attention_bias)


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    feed_forward = replace(config.feed_forward, has_bias=config.mlp_bias)
    return (replace(config.layer, mixer=attention(config), feed_forward=feed_forward),) * config.num_layers


FAMILY = Family(Config=Config, layers=layers, doc=__doc__)

"""Llama 1, 2, 3 and 3.1 to 3.3 (Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783)."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}

OLD_NAMES = {"max_sequence_length": "max_position_embeddings"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Llama."""

    mlp_bias: bool


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    feed_forward = replace(config.feed_forward, has_bias=config.mlp_bias)
    return (replace(config.layer, feed_forward=feed_forward),) * config.num_layers


FAMILY = Family(Config, DEFAULTS, old_names=OLD_NAMES, layers=layers, doc=__doc__)

"""OLMo 1 (Groeneveld et al. 2024, arXiv:2402.00838): Llama with layer norms without weights, and clipped queries, keys
and values.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {"vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one OLMo."""

    clip_qkv: float | None


def _read(fields: dict[str, Any]) -> Config:
    return read_config(Config, fields, norm_eps=1e-5, norm_kind="layer")


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, clip=config.clip_qkv)
    norm = replace(config.norm, has_gain=False)
    return (replace(config.layer, mixer=attention, norm=norm),) * config.num_layers


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__, features=("norms without weights",))

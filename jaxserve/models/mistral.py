"""Mistral and Ministral (Jiang et al. 2023, arXiv:2310.06825): Llama without biases, and a sliding window in all layers
(or in those that `layer_types` names), or in none.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Mistral."""

    sliding_windows: tuple[int | None, ...]


def _read(fields: dict[str, Any]) -> Config:
    window = hf_config.optional_integer(fields, "sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    everywhere = [kind] * hf_config.integer(fields, "num_hidden_layers")
    return read_config(Config, fields, sliding_windows=hf_config.windows_by_type(fields, window, everywhere))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    return tuple(
        replace(config.layer, mixer=replace(config.attention, sliding_window=window))
        for window in config.sliding_windows
    )


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__)

"""Code World Model (FAIR CodeGen Team 2025, arXiv:2510.02387): Mistral with windows in three of four layers."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config, hf_rope, mistral
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 64,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "sliding_window": 8192, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    }
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mistral.Config):
    """The shape of one Code World Model."""

    mlp_bias: bool


def _read(fields: dict[str, Any]) -> Config:
    window = hf_config.optional_integer(fields, "sliding_window")
    num_layers = hf_config.integer(fields, "num_hidden_layers")
    default = ["sliding_attention" if index % 4 else "full_attention" for index in range(num_layers)]
    windows = hf_config.windows_by_type(fields, window, default)
    return read_config(Config, fields, sliding_windows=windows, rope=hf_rope.rope(fields, theta=1_000_000.0))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    feed_forward = replace(config.feed_forward, has_bias=config.mlp_bias)
    return tuple(replace(layer, feed_forward=feed_forward) for layer in mistral.layers(config))


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__)

"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v, and windows on some layers."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA, read_config

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "sliding_window": 4096, "max_window_layers": 28
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Qwen 2."""

    sliding_windows: tuple[int | None, ...]


def _read(fields: dict[str, Any]) -> Config:
    return read_config(Config, fields, sliding_windows=hf_config.layer_windows(fields))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, qkv_bias=True)
    return tuple(
        replace(config.layer, mixer=replace(attention, sliding_window=window)) for window in config.sliding_windows
    )


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__)

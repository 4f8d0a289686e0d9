"""Qwen 3, dense (Yang et al. 2025, arXiv:2505.09388): Qwen 2 with norms on the heads of q and k instead of biases."""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import Layer
from jaxserve.models import hf_config, qwen2
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = qwen2.DEFAULTS | {"head_dim": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Qwen 3."""

    sliding_windows: tuple[int | None, ...]


def _read(fields: dict[str, Any]) -> Config:
    return read_config(
        Config, fields, head_dim=hf_config.integer(fields, "head_dim"), sliding_windows=hf_config.layer_windows(fields)
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(config.attention, head_norm=HeadNorm(norm=config.norm))
    return tuple(
        replace(config.layer, mixer=replace(attention, sliding_window=window)) for window in config.sliding_windows
    )


FAMILY = Family(Config, DEFAULTS, _read, layers=layers, doc=__doc__, features=("QK norm",))

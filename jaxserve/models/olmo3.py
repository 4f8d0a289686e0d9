"""OLMo 3 (OLMo Team 2025, arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers, whose rotations are
not scaled.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import WindowedConfig
from jaxserve.layers.layer import Layer
from jaxserve.layers.rope import Rope
from jaxserve.models import hf_config, hf_rope, mixture, olmo2
from jaxserve.models.reading import read_config

THETA = 500_000.0

DEFAULTS: dict[str, Any] = olmo2.DEFAULTS | {"sliding_window": 4096}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """The shape of one OLMo 3."""

    local_rope: Rope
    """Rotary embedding of layers with a sliding window."""


def _read(fields: dict[str, Any]) -> Config:
    window = hf_config.optional_integer(fields, "sliding_window")
    rope, local_rope = hf_rope.ropes_by_type(fields, size=hf_config.head_dim(fields), theta=THETA, local_theta=THETA)
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        head_norm="joint",
        sliding_windows=hf_config.periodic_windows(fields, window, period=4),
        rope=rope,
        local_rope=local_rope,
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    return mixture.by_window(olmo2.layers(config), local={"rope": config.local_rope}, full={})


FAMILY = replace(olmo2.FAMILY, Config=Config, defaults=DEFAULTS, read=_read, layers=layers, doc=__doc__)
